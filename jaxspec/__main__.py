"""One prompt on the command line: `jaxspec "Why is the sky blue?"`, or `python -m jaxspec`.

The answer streams to stdout; progress, statistics and errors go to stderr. Exit status: 0; 1 if the engine
could not finish the answer; 2 for bad input, or if stdout cannot be written; 130 after Ctrl-C.
"""

import argparse
import sys
import time
from typing import Any

from jaxspec.checkpoints import CheckpointError
from jaxspec.command_line import (
    CommandError,
    Parser,
    add_device_option,
    add_sampling_options,
    add_speculation_options,
    drafter_from,
    drafter_options,
    report,
    sampling_params,
    write,
)
from jaxspec.config import ConfigError, list_configs
from jaxspec.engine import EngineError, Generation
from jaxspec.engine.load import DEFAULT_MODEL, load, resolve_config
from jaxspec.sampling import required_mode


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="jaxspec", description="Answer one prompt with speculative decoding.")
    parser.add_argument("prompt", help="the user's turn, formatted with the model's chat template")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"a configuration ({', '.join(list_configs())}), a TOML file, a checkpoint folder, a .gguf file "
        "or a Hugging Face Hub id; default: %(default)s",
    )
    parser.add_argument(
        "--drafter",
        metavar="SOURCE",
        help="checkpoint of a head or of a smaller model that drafts; default: that of the configuration, or "
        "prompt lookup if MODEL is a checkpoint",
    )
    add_device_option(parser)
    add_sampling_options(parser)
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["drafter"], "with --no-speculation")
    try:
        return _answer(args)
    except (ConfigError, CheckpointError, CommandError, EngineError) as error:
        return report(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _answer(args: argparse.Namespace) -> int:
    if not args.prompt:
        raise CommandError("the prompt is empty")
    if any("\ud800" <= character <= "\udfff" for character in args.prompt):
        raise CommandError("the prompt is not valid Unicode")
    params = sampling_params(args)
    config = resolve_config(args.model)
    drafter = _drafter(args.drafter, is_configured=config.target.source != args.model)
    engine = load(
        args.model,
        drafter={**drafter, **drafter_options(args, config.replace(drafter=drafter))},
        device=args.device,
        sampling_modes=(required_mode(params),),
        batch_size=1,
    )
    try:
        deltas = engine.stream(args.prompt, params, raw=args.raw)
    except ValueError as error:
        raise CommandError(error) from None
    start = time.perf_counter()
    for delta in deltas:
        write(delta.text)
    write("\n")
    assert delta.generation is not None  # set in the last piece
    generation = delta.generation
    seed = f"; seed {generation.seed}" if params.temperature else ""
    print(f"[{_summary(generation, time.perf_counter() - start)}{seed}]", file=sys.stderr)
    if generation.error is None:
        return 0
    report(f"{generation.finish_reason}: {generation.error}")
    return 1


def _drafter(source: str | None, *, is_configured: bool) -> dict[str, Any]:
    """The keys of `[drafter]` for --drafter; none without it, if a configuration names the drafter.

    Raises:
      CommandError: the source holds no known drafter.
    """
    if source is None:
        return {} if is_configured else {"kind": "ngram"}
    return drafter_from(source, option="--drafter")


def _summary(generation: Generation, seconds: float) -> str:
    count, stats = len(generation.token_ids), generation.stats
    return (
        f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s; "
        f"{stats.steps} target passes, acceptance length {stats.acceptance_length:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
