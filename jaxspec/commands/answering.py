"""The engine and the answers of the command lines for one prompt and for a chat."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.commands.command_line import (
    CommandError,
    add_device_option,
    add_length_option,
    drafter_from,
    drafter_options,
    write,
)
from jaxspec.config import DEFAULT_MODEL, list_configs, resolve_config
from jaxspec.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine import Engine, Generation
    from jaxspec.engine.api.prompts import Prompt


_AT_ONCE = 1e-3
"""Seconds between pieces that came from the device together; no rate follows from them."""


class RefusedError(CommandError):
    """A prompt that an engine does not answer; it answers others."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --drafter, --max-model-len and --device."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"a configuration ({', '.join(list_configs())}), a TOML file, a checkpoint folder, a .gguf file "
        "or a Hugging Face Hub id; default: %(default)s",
    )
    parser.add_argument(
        "--drafter",
        metavar="DRAFTER",
        help="a kind of drafter (ngram, …), the checkpoint of a head or of a smaller model, or a "
        "configuration, whose drafter to take; default: that of MODEL, or prompt lookup for a checkpoint",
    )
    add_length_option(parser)
    add_device_option(parser)


def load_engine(args: argparse.Namespace, params: SamplingParams, *, answers: int = 1) -> "Engine":
    """Loads an engine for the options of a command line, with a slot for each of so many answers if the
    configuration has so many.

    Raises:
      OneLineError: the model, the drafter or an option is bad.
    """
    config = resolve_config(args.model)
    # The command line has been read without JAX, which takes a second or more to import.
    import jaxspec
    from jaxspec.sampling import required_mode

    drafter = {} if args.drafter is None else drafter_from(args.drafter, option="--drafter")
    drafter |= drafter_options(args, config.replace(drafter=drafter))
    return jaxspec.load(
        args.model,
        drafter=drafter,
        device=args.device,
        sampling_modes=(required_mode(params),),
        batch_size=min(answers, config.engine.batch_size),
        **({} if args.max_model_len is None else {"max_model_len": args.max_model_len}),
    )


def check_text(text: str) -> str:
    """The text of a turn.

    Raises:
      RefusedError: it is empty, or not valid Unicode.
    """
    if not text:
        raise RefusedError("the prompt is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RefusedError("the prompt is not valid Unicode")
    return text


def stream_answer(
    engine: "Engine",
    prompt: "Prompt",
    params: SamplingParams,
    *,
    said: list[str] | None = None,
    **options: Any,
) -> "Generation":
    """Writes an answer to stdout as it streams, then a line of statistics to stderr.

    Args:
      said: takes the pieces of text as they are written.
      **options: how the prompt becomes tokens, as in `Engine.stream`.

    Raises:
      RefusedError: the prompt is too long or cannot be formatted.
      CommandError: the engine failed, or stdout cannot be written.
    """
    from jaxspec.engine import EngineError

    start = time.perf_counter()
    try:
        deltas = engine.stream(prompt, params, **options)
    except ValueError as error:
        raise RefusedError(error) from None
    first, first_seconds = 0, 0.0
    try:
        for delta in deltas:
            if not first:
                first, first_seconds = len(delta.token_ids), time.perf_counter() - start
            write(delta.text)
            if said is not None:
                said.append(delta.text)
    except EngineError as error:
        raise CommandError(error) from None
    seconds = time.perf_counter() - start
    assert delta.generation is not None  # set in the last piece
    generation = delta.generation
    write("\n" + _logprobs(generation))
    count = len(generation.token_ids)
    has_rate = count > first and seconds - first_seconds > _AT_ONCE
    rate = f", then {(count - first) / (seconds - first_seconds):.1f} tokens/s" if has_rate else ""
    _say(generation, f"the first after {first_seconds:.2f} s{rate}", has_seed=bool(params.temperature))
    return generation


def generate_answers(
    engine: "Engine", prompt: "Prompt", params: SamplingParams, *, n: int, best_of: int | None, **options: Any
) -> "list[Generation]":
    """Several answers to a prompt, as `Engine.generate` returns them, with its options.

    Raises:
      CommandError: the prompt is too long or cannot be formatted, or the engine failed.
    """
    from jaxspec.engine import EngineError

    try:
        return engine.generate(prompt, params, n=n, best_of=best_of, **options)
    except (ValueError, EngineError) as error:
        raise CommandError(error) from None


def write_answers(answers: "Sequence[Generation]", *, as_json: bool, has_logprobs: bool) -> None:
    """Writes answers to stdout: each as a line of JSON, or as text with a line of statistics on stderr.

    Args:
      has_logprobs: whether the text is followed by log-probabilities.

    Raises:
      CommandError: stdout cannot be written.
    """
    for i, answer in enumerate(answers):
        if as_json:
            write(json.dumps(answer.to_dict(), ensure_ascii=False) + "\n")
        else:
            write(("\n" if i else "") + answer.text + "\n" + (_logprobs(answer) if has_logprobs else ""))
            _say(answer, f"answer {i + 1} of {len(answers)}", has_seed=True)


def _logprobs(generation: "Generation") -> str:
    """A line for each token: its log-probability, the token, and the most likely tokens in its place; empty
    if they were not asked for."""
    if generation.logprobs is None:
        return ""
    top = generation.top_logprobs or [{}] * len(generation.logprobs)
    told = zip(generation.logprobs, generation.token_texts, top, strict=True)
    return "".join(
        "  ".join([f"{logprob:9.4f}", repr(text), *(_likely(generation, *each) for each in likely.items())])
        + "\n"
        for logprob, text, likely in told
    )


def _likely(generation: "Generation", token: int, logprob: float) -> str:
    text = (
        str(token)
        if generation.tokenizer is None
        else repr(generation.tokenizer.decode([token], skip_special_tokens=False))
    )
    return f"{text} {logprob:.4f}"


def _say(generation: "Generation", how: str, *, has_seed: bool) -> None:
    """Writes a line of statistics to stderr."""
    stats, seed = generation.stats, f"; seed {generation.seed}" if has_seed else ""
    print(
        f"[{len(generation.token_ids)} tokens: {how}; {stats.steps} target passes, "
        f"acceptance length {stats.acceptance_length:.2f}{seed}]",
        file=sys.stderr,
    )
