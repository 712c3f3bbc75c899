"""Answer files of prompts: `jaxspec batch`.

    jaxspec batch CONFIG --input IN.jsonl --output OUT.jsonl [--summary FILE.json]

CONFIG is a configuration's name, a TOML file, a checkpoint folder, a .gguf file or a Hugging Face Hub id.
Every row of IN.jsonl is {"prompt": ...}, {"messages": [...]} or {"turns": [...]}, optionally with an "id",
sampling parameters of its own ("temperature", "max_new_tokens", ...), "n" and "chat_template_kwargs".
Exit status: 0; 1 if some rows failed and all others are done; 2 for bad input, or if something cannot be
written; 130 after Ctrl-C.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxspec.commands.command_line import (
    CommandError,
    Parser,
    add_device_option,
    add_length_option,
    add_number_of_samples,
    add_prompt_options,
    add_sampling_options,
    add_speculation_options,
    drafter_options,
    report,
)
from jaxspec.config import Config, resolve_config
from jaxspec.errors import OneLineError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except OSError as error:  # of stderr, which is full or a pipe whose reader has ended
        return report(error)


def _main(arguments: list[str]) -> int:
    args = _parse(arguments)
    try:
        config, changes = _configuration(args)
        # The command line has been read without JAX, which takes a second or more to import.
        from jaxspec.commands.batch_job import answer_rows

        return answer_rows(args, config, changes, shlex.join(["jaxspec", "batch", *arguments]))
    except OneLineError as error:
        return report(error)
    except KeyboardInterrupt:
        resume = "" if str(args.output).lower().endswith(".parquet") else "; --resume continues"
        up_to = ", up to the first row that was not" if args.keep_order else ""
        print(f"interrupted: {args.output} holds what was finished{up_to}{resume}", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="jaxspec batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration or checkpoint to load")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="IN.jsonl",
        help="rows to answer: files, folders, pipes or URLs, read in order, or - for stdin; those that end "
        "in .parquet are Parquet (extra parquet)",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="OUT.jsonl",
        help="answers, in the order in which they finish; OUT.parquet of Parquet appears at the end",
    )
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="write answers in the order of the rows; each waits for those before it",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        choices=["force"],
        metavar="force",
        help="skip the rows that OUT.jsonl answers; its settings must be the same, unless forced",
    )
    parser.add_argument(
        "--prompt-key", metavar="KEY", help="the key of the rows' question: a text, token ids or messages"
    )
    parser.add_argument(
        "--keep-columns",
        nargs="*",
        metavar="KEY",
        help="copy these keys of a row to its answer; without names, all that ask for nothing",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="rows per engine at once; default: the configuration's"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="number of engines, each in its own process with its own GPUs or CPU cores; default: 1; with "
        "--ray, as many as the GPUs allow",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="M",
        help="devices per engine; default: the configuration's",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="engines on a Ray cluster (extra ray): that of ADDRESS or RAY_ADDRESS, or a new one here",
    )
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="speed and acceptance, as JSON")
    add_length_option(parser)
    add_device_option(parser)
    add_sampling_options(parser)
    add_number_of_samples(parser, "each row that does not say how many")
    add_prompt_options(parser)
    parser.add_argument(
        "--continue-final-message",
        action="store_true",
        help="the rows' last message is the assistant's, and the beginning of the answer",
    )
    add_speculation_options(parser)
    return parser.parse_args(arguments)


def _configuration(args: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """The configuration with the changes of the options, and these as keywords of `jaxspec.load`.

    Raises:
      OneLineError: there is none of this name, or an option is bad.
    """
    for option, number in [("--limit", args.limit), ("--replicas", args.replicas)]:
        if number is not None and number < 1:
            raise CommandError(f"{option} must be at least 1, got {number}")
    config = resolve_config(args.config)
    drafter = drafter_options(args, config)
    sizes = {name: getattr(args, name) for name in ("batch_size", "max_model_len", "tensor_parallel")}
    engine = {name: value for name, value in sizes.items() if value is not None}
    return config.replace(drafter=drafter, engine=engine), {"drafter": drafter, **engine}
