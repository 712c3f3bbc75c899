"""One prompt on the command line: `jaxspec "Why is the sky blue?"`, or `jaxspec generate …`.

`jaxspec -` reads the prompt from stdin. The answer streams to stdout; progress, statistics and errors go to
stderr. Exit status: 0; 1 if the engine could not
finish the answer; 2 for bad input, or if stdout cannot be written; 130 after Ctrl-C.

JAX is imported only once the command line is known to be good.
"""

import argparse
import sys

from jaxspec.commands import COMMANDS
from jaxspec.commands.answering import add_model_options, check_text, load_engine, stream_answer
from jaxspec.commands.command_line import (
    CommandError,
    Parser,
    add_prompt_options,
    add_sampling_options,
    add_speculation_options,
    prompt_options,
    report,
    sampling_params,
)
from jaxspec.errors import OneLineError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    parser = Parser(
        prog="jaxspec",
        usage="jaxspec [generate] PROMPT [options]",
        description="Answer one prompt with speculative decoding.",
        epilog="\n".join(["commands, each with --help:", *commands]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", help="the user's turn, formatted with the model's chat template; - reads it from stdin"
    )
    add_model_options(parser)
    add_sampling_options(parser)
    add_prompt_options(parser)
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["drafter"], "with --no-speculation")
    try:
        return _answer(args)
    except OneLineError as error:
        return report(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _answer(args: argparse.Namespace) -> int:
    prompt = _stdin() if args.prompt == "-" else args.prompt
    check_text(prompt)
    params = sampling_params(args, args.model)
    generation = stream_answer(
        load_engine(args, params), prompt, params, raw=args.raw, **prompt_options(args)
    )
    if generation.error is None:
        return 0
    report(f"{generation.finish_reason}: {generation.error}")
    return 1


def _stdin() -> str:
    """The text on stdin without its last line break.

    Raises:
      CommandError: stdin is closed, cannot be read, or is not UTF-8.
    """
    if sys.stdin is None:
        raise CommandError("cannot read the prompt from stdin: it is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read the prompt from stdin: {error}") from None
