"""One prompt on the command line: `jaxspec "Why is the sky blue?"`, or `jaxspec generate …`.

`jaxspec -` reads the prompt from stdin. The answer streams to stdout, followed by its log-probabilities if
they are asked for. Several answers have an empty line between them, and with --json each is a line of JSON as
`Generation.to_dict` makes it. Progress, statistics and errors go to stderr. Exit status: 0; 1 if the engine
could not finish an answer; 2 for bad input, or if stdout cannot be written; 130 after Ctrl-C.

JAX is imported only once the command line is known to be good.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec.commands import COMMANDS
from jaxspec.commands.answering import (
    add_model_options,
    check_text,
    generate_answers,
    load_engine,
    stream_answer,
    write_answers,
)
from jaxspec.commands.command_line import (
    CommandError,
    Parser,
    add_number_of_samples,
    add_prompt_options,
    add_sampling_options,
    add_speculation_options,
    prompt_options,
    report,
    sampling_params,
)
from jaxspec.errors import OneLineError

if TYPE_CHECKING:
    from jaxspec.engine.api.prompts import Prompt


class _Parser(Parser):
    def about_words(self, words: Sequence[str], args: argparse.Namespace) -> str:
        if args.prompt is None:
            return super().about_words(words, args)
        prompt = shlex.join(["jaxspec", " ".join([args.prompt, *words])])
        return f"a prompt of several words needs quotes: {prompt}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    parser = _Parser(
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
    add_number_of_samples(parser, "the prompt")
    parser.add_argument(
        "--best-of", type=int, metavar="N", help="draw so many answers, and take the likeliest by token"
    )
    add_prompt_options(parser)
    parser.add_argument(
        "--continue-final-message",
        metavar="TEXT",
        help="the beginning of the answer, which goes on where this ends",
    )
    parser.add_argument(
        "--json", action="store_true", help="write an answer as a line of JSON, with its tokens and counts"
    )
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["drafter"], "with --no-speculation")
    if args.raw:
        parser.refuse(args, ["continue_final_message"], "with --raw")
    if args.logprobs is None:
        parser.refuse(args, ["logprobs_mode"], "without --logprobs")
    if args.best_of is not None and args.best_of < (args.n or 1):
        parser.error(f"--best-of must be at least {args.n or 1}, got {args.best_of}")
    try:
        return _answer(args)
    except OneLineError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _answer(args: argparse.Namespace) -> int:
    text = check_text(_stdin() if args.prompt == "-" else args.prompt)
    prompt: Prompt = text
    params = sampling_params(args, args.model)
    options = {"raw": args.raw, **prompt_options(args)}
    if args.continue_final_message is not None:
        begun = check_text(args.continue_final_message)
        prompt = [{"role": "user", "content": text}, {"role": "assistant", "content": begun}]
        options["continue_final_message"] = True
    if args.json or args.n is not None or args.best_of is not None:
        engine = load_engine(args, params, answers=args.best_of or args.n or 1)
        answers = generate_answers(engine, prompt, params, n=args.n or 1, best_of=args.best_of, **options)
        write_answers(answers, as_json=args.json, has_logprobs=params.logprobs is not None)
    else:
        said: list[str] = []
        try:
            answers = [stream_answer(load_engine(args, params), prompt, params, said=said, **options)]
        except KeyboardInterrupt:
            if said:
                print(file=sys.stderr)  # ends the line of the answer
            raise
    failed = [answer for answer in answers if answer.error is not None]
    for answer in failed:
        report(f"{answer.finish_reason}: {answer.error}")
    return 1 if failed else 0


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
