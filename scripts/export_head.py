"""Export an EAGLE-3 head to another format, for example the shipped head for speculators and vLLM.

    python scripts/export_head.py HEAD OUTPUT [--target NAME] [--format speculators] [--target-name ORG/NAME]

HEAD is the name or file of a configuration or, with --target, a folder or a Hugging Face Hub id. If the
format includes the target's output rows and embedding and HEAD lacks them, they are added. Exit status: 0; 2
for bad input.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp

from jaxspec.commands.command_line import CommandError, Parser, report
from jaxspec.config import Config, ConfigError, DrafterConfig, list_configs, load_config, resolve_config
from jaxspec.drafters.formats import open_drafter
from jaxspec.drafters.head import DRAFT_ORDER
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.gguf.architecture import model_classes
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.export import FORMATS, embedding_rows, export_head
from jaxspec.lab.training.head import config_from
from jaxspec.models.target import load_target


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", metavar="HEAD", help="a configuration, or the checkpoint of a head")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--target", metavar="NAME", help="the model that the head is for")
    parser.add_argument("--format", choices=FORMATS, default="speculators", help="default: speculators")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the weights"
    )
    parser.add_argument(
        "--target-name", help="name by which speculators and vLLM find the target; default: its name here"
    )
    args = parser.parse_args(arguments)
    try:
        pair = _pair(args.head, args.target)
        _export(pair, args)
    except (ConfigError, CheckpointError, CommandError) as error:
        return report(error)
    print(f"{args.output}: {args.format}")
    return 0


def _pair(head: str, target: str | None) -> Config:
    """A configuration of a target and an EAGLE-3 head."""
    if head in list_configs() or head.endswith(".toml"):
        pair = load_config(head)
        if pair.drafter.kind != "eagle3":
            raise CommandError(f"{head}: drafts by {pair.drafter.kind}, not by an EAGLE-3 head")
        return pair if target is None else dataclasses.replace(pair, target=resolve_config(target).target)
    if target is None:
        raise CommandError("--target: name the model that the head is for")
    return Config(head, resolve_config(target).target, DrafterConfig("eagle3", 4, source=head))


def _export(pair: Config, args: argparse.Namespace) -> None:
    source = pair.target
    checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
    target = load_target(checkpoint, dtype=jnp.dtype(jnp.float32))
    whole = dataclasses.replace(pair.drafter, draft_vocab_size=None)
    head = load_drafter(whole, target, Build(jnp.dtype(jnp.float32)))
    assert isinstance(head, Eagle3)
    # Heads that training cannot start from cannot be exported either.
    config_from(head.config, HeadConfig(initial="head"), target.config, head.config.draft_vocab_size)
    order = open_drafter(whole).tensors.get(DRAFT_ORDER)
    name = args.target_name or source.file or source.source
    assert pair.drafter.source is not None  # DrafterConfig checks it
    card = Path(pair.drafter.source) / "README.md"
    text = card.read_text("utf-8") if card.is_file() else f"# An EAGLE-3 head for {name}\n"
    export_head(
        head,
        target.config,
        args.output,
        form=args.format,
        target_name=name,
        architectures=model_classes(checkpoint.config),
        dtype=args.dtype,
        embedding=embedding_rows(target),
        order=None if order is None else order.read(),
        card=f"{text}\nThese files were exported from that head in the format {args.format!r}.\n",
    )


if __name__ == "__main__":
    sys.exit(main())
