"""Shared parts of the command lines: options, output, and errors of one line."""

import argparse
import dataclasses
import json
import os
import runpy
import shlex
import sys
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NoReturn, TextIO, get_args

from jaxspec import __version__
from jaxspec.config import Config, resolve_config
from jaxspec.errors import OneLineError
from jaxspec.sampling import DEFAULT_MAX_NEW_TOKENS, SamplingParams, generation_defaults
from jaxspec.sampling.grammar import MAX_TEXT as MAX_GRAMMAR
from jaxspec.sampling.params import MAX_LOGPROBS, LogprobsMode
from jaxspec.spelling import nearest


class CommandError(OneLineError):
    """A bad command line; the message names the argument."""


class _Import(argparse.Action):
    """Runs a Python file when the option is parsed, and appends its path to `imports`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, path: Any, option: str | None = None
    ) -> None:
        try:
            runpy.run_path(path)
        except (OSError, SyntaxError, ImportError) as error:
            parser.error(f"--import {path}: {error}")
        namespace.imports = (*namespace.imports, os.path.abspath(path))


class Parser(argparse.ArgumentParser):
    """A parser that reports a bad argument in one line, without the usage, and exits with status 2."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        _open_stderr()
        self.add_argument("--version", action="version", version=f"jaxspec {__version__}")
        self.add_argument(
            "--import",
            action=_Import,
            dest="imports",
            default=(),
            metavar="FILE",
            help="a Python file to run first, which registers your own drafters or families",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, with an error for every word that is not known, which is the first to be told."""
        words = sys.argv[1:] if args is None else list(args)
        for word in takewhile(lambda word: word != "--", words):
            self._check_option(word)
        parsed, others = super().parse_known_args(words, namespace)
        if others:
            self.error(self.about_words(others, parsed))
        return parsed, []

    def about_words(self, words: Sequence[str], args: argparse.Namespace) -> str:
        """The error about words that are no argument."""
        return f"unexpected {shlex.join(words)}"

    def _check_option(self, word: str) -> None:
        known, name = self._option_string_actions, word.partition("=")[0]
        is_option = name.startswith("-") and name.lstrip("-")[:1].isalpha() and " " not in word
        # Options may be shortened.
        if not is_option or any(option.startswith(name) for option in known):
            return
        meant = nearest(name, known)
        self.error(f"there is no option {name}" + (f"; did you mean {meant}?" if meant else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")

    def refuse(self, args: argparse.Namespace, names: Sequence[str], why: str) -> None:
        """Exits with status 2 if one of these options was given, which have no effect `why`."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                self.error(f"--{name.replace('_', '-')} has no effect {why}")

    def print_help(self, file: Any = None) -> None:
        """Writes the help to stdout; exits with status 2 if stdout cannot be written."""
        try:
            write(self.format_help())
        except CommandError as error:
            self.exit(report(error))


def write(text: str) -> None:
    """Writes to stdout and flushes. Characters that its encoding lacks are escaped, with one note on stderr.

    Raises:
      CommandError: stdout is closed or full, or a pipe whose reader has ended.
    """
    if sys.stdout is None:
        raise CommandError("cannot write to stdout: it is closed")
    try:
        try:
            print(text, end="", flush=True)
        except UnicodeEncodeError as error:
            print(
                f"note: characters not in stdout's {error.encoding} are escaped; set PYTHONIOENCODING=utf-8",
                file=sys.stderr,
            )
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            print(text, end="", flush=True)
    except OSError as error:
        _discard(sys.stdout)
        raise CommandError(f"cannot write to stdout: {error.strerror}") from None


def _discard(stream: TextIO) -> None:
    """Sends the rest of a stream to nowhere; otherwise Python fails again when it flushes at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _open_stderr() -> None:
    """Opens stderr to nowhere if it is closed.

    Otherwise messages for it would go to stdout, progress bars fail, and what libraries write to descriptor 2
    go into the first file that is opened.
    """
    if sys.stderr is not None:
        return
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        os.fstat(2)
    except OSError:
        os.dup2(sys.stderr.fileno(), 2)


def add_sampling_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds options for the fields of `SamplingParams`, --sampling-defaults and --raw.

    Args:
      without: names of those that this command has no use for.
    """
    group = parser.add_argument_group("sampling")
    for name, options in _SAMPLING.items():
        if name not in without:
            group.add_argument(_flag(name), **options)
    add_sampling_defaults(group, "what is not given")
    if "raw" not in without:
        group.add_argument("--raw", action="store_true", help="pass prompts without the chat template")
    group = parser.add_argument_group("constraints")
    for name, options in _CONSTRAINTS.items():
        group.add_argument(_flag(name), **options)
    grammar = group.add_mutually_exclusive_group()
    for name, options in _GRAMMARS.items():
        grammar.add_argument(_flag(name), **options)


def add_sampling_defaults(group: "argparse._ActionsContainer", what: str) -> None:
    """Adds --sampling-defaults, which takes `what` from the model's `generation_config.json`."""
    group.add_argument(
        "--sampling-defaults",
        action="store_true",
        help=f"take {what} from the model's generation_config.json",
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=NUMBER, got {text!r}") from None


def _text_of(path: str) -> str:
    """The text of a file.

    Raises:
      ArgumentTypeError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_GRAMMAR + 1)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {problem}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# The fields of `SamplingParams`, but for two that the options about the drafter stand for.
_SAMPLING: dict[str, dict[str, Any]] = {
    "max_new_tokens": {
        "type": int,
        "metavar": "N",
        "help": f"default: {DEFAULT_MAX_NEW_TOKENS}, or as many as there is room for",
    },
    "temperature": {"type": float, "metavar": "T", "help": "default: 0, greedy"},
    "top_p": {"type": float, "metavar": "P", "help": "default: 1, all"},
    "top_k": {"type": int, "metavar": "K", "help": "default: 0, all"},
    "min_p": {"type": float, "metavar": "P", "help": "default: 0, all"},
    "seed": {"type": int, "metavar": "N", "help": "of draws; default: at random, and reported"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "ends the answer; may be given several times"},
    "stop_token_ids": {
        "type": int,
        "action": "append",
        "metavar": "ID",
        "help": "a token that ends the answer; may be given several times",
    },
    "ignore_eos": {"action": "store_true", "help": "do not stop at end-of-sequence tokens"},
    "logprobs": {
        "type": int,
        "metavar": "N",
        "help": "the log-probability of every token, and of the N likeliest in its place; 0 to "
        f"{MAX_LOGPROBS}",
    },
    "logprobs_mode": {
        "choices": get_args(LogprobsMode),
        "help": "of the model's own distribution, or of the one that was sampled from; default: raw_logprobs",
    },
}
_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {
        "type": float,
        "metavar": "X",
        "help": "divides the logits of tokens in the prompt and the answer; default: 1, off",
    },
    "presence_penalty": {
        "type": float,
        "metavar": "X",
        "help": "less for the logits of tokens in the answer; default: 0",
    },
    "frequency_penalty": {
        "type": float,
        "metavar": "X",
        "help": "less for every time that a token is in the answer; default: 0",
    },
    "logit_bias": {
        "type": _bias,
        "action": "append",
        "metavar": "ID=X",
        "help": "adds X to the logit of a token; may be given several times",
    },
    "bad_words": {
        "action": "append",
        "metavar": "TEXT",
        "help": "what must not be in the answer; may be given several times",
    },
    "min_tokens": {"type": int, "metavar": "N", "help": "tokens before the answer may end; default: 0"},
    "no_repeat_ngram_size": {
        "type": int,
        "metavar": "N",
        "help": "repeats no sequence of N tokens; default: 0, off",
    },
}
_GRAMMARS: dict[str, dict[str, Any]] = {
    "choice": {
        "action": "append",
        "metavar": "TEXT",
        "help": "the answer is one of these; one option for each",
    },
    "regex": {"metavar": "PATTERN", "help": "matches all of the answer; in Python's syntax"},
    "json_schema": {"type": _text_of, "metavar": "FILE", "help": "a JSON schema, which the answer follows"},
}


def add_number_of_samples(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --n."""
    parser.add_argument("--n", type=_count, metavar="N", help=f"answers to {what}; needs a temperature")


def _count(text: str) -> int:
    """Parses a number, 1 or more.

    Raises:
      ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdecimal() or not int(text[:9]) >= 1 or len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return int(text)


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Adds options that say how prompts become tokens."""
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="""arguments of the chat template, such as '{"enable_thinking": false}'""",
    )
    group.add_argument(
        "--special-tokens-as-text",
        action="store_true",
        help="take special tokens in texts as text; only the chat template's own are tokens",
    )


def prompt_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_prompt_options` that were given, as keywords of `Engine.stream`."""
    given = {name: getattr(args, name) for name in ("chat_template_kwargs", "special_tokens_as_text")}
    return {name: value for name, value in given.items() if value}


def _json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      ArgumentTypeError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Adds options that change the configuration's drafter."""
    group = parser.add_argument_group("speculation").add_mutually_exclusive_group()
    group.add_argument(
        "--num-speculative-tokens",
        type=drafts_option,
        metavar="K",
        help='drafts per step, or "auto": chosen all the time for the most tokens per second',
    )
    group.add_argument("--no-speculation", action="store_true", help="decode without drafts")


def add_length_option(parser: "argparse._ActionsContainer") -> None:
    """Adds --max-model-len, for the argument of `load`."""
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a prompt and its answer")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Adds --device, for the argument `device` of `load`."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help='"cpu", "gpu", "gpu:1" or, to use several, "gpu:0,gpu:1"; default: jax\'s own',
    )


def drafts_option(text: str) -> int | str:
    """Parses a number of drafts, or "auto".

    Raises:
      ArgumentTypeError: neither.
    """
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from None


def sampling_params(args: argparse.Namespace, model: str, *, may_sample: bool = False) -> SamplingParams:
    """The parameters given by the options of `add_sampling_options`.

    Args:
      model: the name of that which has the defaults that --sampling-defaults asks for.
      may_sample: whether requests may set another temperature.

    Raises:
      CommandError: a value is out of range, or has no effect at temperature 0, or the model recommends none.
      CheckpointError: the model of --sampling-defaults cannot be opened.
    """
    names = {field.name for field in dataclasses.fields(SamplingParams)} & vars(args).keys()
    names -= {"num_speculative_tokens"}  # that option is about the drafter
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.sampling_defaults:
        given = {**model_defaults(model), **given}
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise CommandError(error) from None
    if params.temperature or may_sample:
        return params
    default = SamplingParams()
    for name in ("top_p", "top_k", "min_p", "n", "best_of"):
        value = getattr(args, name, None)
        # A value of `SamplingParams` may have another form there.
        if value is not None and getattr(params, name, value) != getattr(default, name, 1):
            raise CommandError(f"{_flag(name)} has no effect without --temperature: at 0, decoding is greedy")
    return params


def model_defaults(model: str) -> dict[str, Any]:
    """The fields of `SamplingParams` that a model's makers recommend, for --sampling-defaults.

    Raises:
      CommandError: they recommend none.
      CheckpointError: the model cannot be opened.
    """
    from jaxspec.files import open_checkpoint  # imports slowly

    target = resolve_config(model).target
    found = generation_defaults(open_checkpoint(target.source, target.file, target.sha256).generation)
    if not found:
        raise CommandError(f"--sampling-defaults: {model} has no generation_config.json that recommends any")
    return found


def drafter_options(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The keys of the configuration's `[drafter]` that the options of `add_speculation_options` set.

    Raises:
      CommandError: a number of drafts is given for a configuration without a drafter.
    """
    if args.no_speculation:
        return {"kind": "none"}
    if args.num_speculative_tokens is None:
        return {}
    if config.drafter.kind == "none":
        raise CommandError(f"--num-speculative-tokens: {config.name} has no drafter")
    return {"num_speculative_tokens": args.num_speculative_tokens}


def drafter_from(source: str, *, option: str) -> dict[str, Any]:
    """The keys of `[drafter]` for a drafter that an option names as `jaxspec.load` does.

    Raises:
      CommandError: it names no drafter; the message names the option.
    """
    from jaxspec.drafters.formats import drafter_keys  # imports slowly

    try:
        return dict(drafter_keys(source))
    except OneLineError as error:
        raise CommandError(f"{option}: {error}") from None


def report(error: object) -> int:
    """Prints an error in one line, if stderr can be written; returns the exit status for bad input, 2."""
    try:
        print(f"error: {error}", file=sys.stderr)
    except OSError:
        _discard(sys.stderr)
    return 2
