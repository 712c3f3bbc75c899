"""A conversation on the command line: `jaxspec chat`.

Every line is a turn of the user, answered with all turns before it in view. Ctrl-C stops an answer, and what
has been said of it stays in the conversation; at the prompt it ends the chat, as Ctrl-D does. /clear begins a
new conversation. Exit status: 0; 2 for bad input, or if stdout cannot be written.
"""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from jaxspec.commands.answering import RefusedError, add_model_options, check_text, load_engine, stream_answer
from jaxspec.commands.command_line import (
    CommandError,
    Parser,
    add_prompt_options,
    add_sampling_options,
    add_speculation_options,
    prompt_options,
    report,
    sampling_params,
    write,
)
from jaxspec.errors import OneLineError

if TYPE_CHECKING:
    from jaxspec.engine import Engine
    from jaxspec.sampling import SamplingParams


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(prog="jaxspec chat", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system's turn, before all others")
    add_sampling_options(parser, without=("raw", "logprobs", "logprobs_mode"))
    add_prompt_options(parser)
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["drafter"], "with --no-speculation")
    try:
        params = sampling_params(args, args.model)
        system = [] if args.system is None else [_turn("system", args.system)]
        engine = load_engine(args, params)
    except OneLineError as error:
        return report(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    try:
        _chat(engine, params, system, prompt_options(args))
    except OneLineError as error:
        return report(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def _chat(
    engine: "Engine", params: "SamplingParams", system: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Answers turns until stdin ends; the options are those of `stream_answer`."""
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise CommandError("--model: a chat needs a chat template, and this checkpoint has none")
    messages = list(system)
    while (line := _read_line()) is not None:
        if line.strip() == "/clear":
            messages = list(system)
        elif line.strip():
            try:
                messages = _answered(engine, params, [*messages, _turn("user", line)], options)
            except RefusedError as error:  # the conversation is too long, for example
                report(error)


def _answered(
    engine: "Engine",
    params: "SamplingParams",
    messages: list[dict[str, Any]],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """The messages with the answer to the last of them."""
    said: list[str] = []
    try:
        generation = stream_answer(engine, messages, params, said=said, **options)
    except KeyboardInterrupt:
        write("\n")
        print("[stopped]", file=sys.stderr)
        return [*messages, _answer("".join(said))]
    if generation.error is not None:
        raise RefusedError(f"{generation.finish_reason}: {generation.error}")
    return [*messages, _answer(generation.text)]


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": check_text(content)}


def _answer(text: str) -> dict[str, Any]:
    """The assistant's turn, which may be without text."""
    return {"role": "assistant", "content": text}


def _read_line() -> str | None:
    """A line of stdin; None at its end."""
    if sys.stdin is None:
        raise CommandError("cannot read turns from stdin: it is closed")
    is_typed = sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    if is_typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit the line
    try:
        return input("> " if is_typed else "")
    except EOFError:
        if is_typed:
            write("\n")
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read turns from stdin: {error}") from None
