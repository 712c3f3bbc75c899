"""The engine and the answers of the command lines for one prompt and for a chat."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from jaxspec.commands.command_line import (
    CommandError,
    add_device_option,
    drafter_from,
    drafter_options,
    write,
)
from jaxspec.config import DEFAULT_MODEL, list_configs, resolve_config
from jaxspec.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxspec.engine import Engine, Generation
    from jaxspec.engine.prompts import Prompt


class RefusedError(CommandError):
    """A prompt that an engine does not answer; it answers others."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --drafter and --device."""
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
    add_device_option(parser)


def load_engine(args: argparse.Namespace, params: SamplingParams) -> "Engine":
    """Loads an engine of one slot for the options of a command line.

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
        batch_size=1,
    )


def check_text(text: str) -> str:
    """The text of a turn.

    Raises:
      CommandError: it is empty, or not valid Unicode.
    """
    if not text:
        raise CommandError("the prompt is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise CommandError("the prompt is not valid Unicode")
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
    write("\n")
    assert delta.generation is not None  # set in the last piece
    generation = delta.generation
    count, stats = len(generation.token_ids), generation.stats
    rate = f", then {(count - first) / (seconds - first_seconds):.1f} tokens/s" if count > first else ""
    seed = f"; seed {generation.seed}" if params.temperature else ""
    print(
        f"[{count} tokens: the first after {first_seconds:.2f} s{rate}; {stats.steps} target passes, "
        f"acceptance length {stats.acceptance_length:.2f}{seed}]",
        file=sys.stderr,
    )
    return generation
