"""Time whole requests: how fast an engine answers them, and where the time goes.

    python scripts/bench_load.py --shape llama3-8b --k 3 --acceptance 3.0 --json FILE
    python scripts/bench_load.py CONFIG --input PROMPTS.jsonl --rate 4 --max-new-tokens 128

With --shape, weights are random and acceptance is synthetic, so the text is meaningless but the work is real;
CONFIG (a configuration or a checkpoint) has its own weights. The requests are those of bench/workloads.py, or
the prompts of a file (the first turn of rows with turns). They arrive all at once, or randomly at a given
rate. Every answer has its full length.

"ms" is the time from the first submission to the end of the last answer: the median of the runs, after one
for warm-up. "padding" is the share of computed prompt rows without a token, and "idle" the share of slots'
steps that emitted nothing. "floor" is the share of the time that reading the weights takes, once per step and
once per program for prompts, at the bandwidth of a copy. "wait" is the time between two pieces of an answer.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from bench.engines import add_engine_option, load_engine
from bench.load import run, summary
from bench.script import new_parser, run_script
from bench.shapes import SHAPES
from bench.timeline import kernel_table, read_kernels
from bench.traffic import copy_bandwidth, weight_bytes
from bench.workloads import Asked, poisson, workloads

from jaxspec.commands.command_line import CommandError, drafter_options, drafts_option
from jaxspec.config import resolve_config
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.engine import Engine
from jaxspec.engine.device.step import Models
from jaxspec.sampling import SamplingParams, required_mode
from jaxspec.service.batch import InputError, RowError, read_rows

_MOST_DRAFTS = 4
_COLUMNS = "{:<16} {:>5} {:>8} {:>8} {:>10} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>6} {:>6}"


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    bandwidth = copy_bandwidth(args.copy_bytes)
    begin = time.perf_counter()
    engine = _load(args)
    load_seconds = time.perf_counter() - begin
    sizes = {"batch_size": args.batch_size, "max_model_len": engine.max_model_len, **args.engine}
    print(
        f"{args.shape or args.config}, K={engine.num_speculative_tokens}, {sizes}: "
        f"loaded in {load_seconds:.1f} s, copy {bandwidth / 1e12:.2f} TB/s"
    )
    names = ("requests", "prompt", "new", "ms", "tokens/s")
    ranks = (
        "first 50",
        "99 ms",
        "token 50",
        "99 ms",
        "wait",
        "most ms",
        "tok/step",
        "padding",
        "idle",
        "floor",
    )
    print(_COLUMNS.format("", *names, *ranks))
    rows = []
    for name, asked in _chosen(args, engine).items():
        row = {"name": name, **_measure(engine, asked, args, bandwidth)}
        rows.append(row)
        print(_line(row), flush=True)
        if args.profile:
            print(_profile(engine, asked, args), flush=True)
    result = {
        "model": args.shape or args.config,
        "num_drafts": engine.num_speculative_tokens,
        "synthetic_acceptance": engine.config.synthetic_acceptance_length,
        "engine": sizes,
        "temperature": args.params.temperature,
        "rate": args.rate,
        "seed": args.seed,
        "load_seconds": load_seconds,
        "copy_bandwidth": bandwidth,
        "rows": rows,
    }
    return result, 0


def _load(args: argparse.Namespace) -> Engine:
    modes = {"sampling_modes": (required_mode(args.params),)}
    sizes = {"batch_size": args.batch_size, "max_model_len": args.max_model_len, **args.engine}
    if args.acceptance is not None:
        sizes["synthetic_acceptance_length"] = args.acceptance
    if args.shape is None:
        return load_engine(args.config, sizes, drafter_options(args, resolve_config(args.config)), **modes)
    is_adaptive = args.num_speculative_tokens == "auto"
    drafter = {"num_drafts": _MOST_DRAFTS if is_adaptive else args.num_speculative_tokens}
    return load_engine(SHAPES[args.shape], sizes, drafter, is_adaptive=is_adaptive, **modes)


def _chosen(args: argparse.Namespace, engine: Engine) -> dict[str, list[Asked]]:
    """The requests to time, by name.

    Raises:
      CommandError: --only has an unknown name, or the file has a bad row.
    """
    if args.input is None:
        every = workloads(vocab_size=engine.vocab_size, seed=args.seed, scale=args.scale)
    else:
        every = {args.input.stem: [Asked(prompt, args.max_new_tokens) for prompt in _prompts(args)]}
    unknown = [name for name in args.only if name not in every]
    if unknown:
        raise CommandError(f"--only: {unknown[0]!r} is unknown; known: {', '.join(map(repr, every))}")
    return {
        name: asked
        for name, asked in every.items()
        if name in args.only or (not args.only and (args.input or _fits(asked, engine)))
    }


def _fits(asked: list[Asked], engine: Engine) -> bool:
    return all(len(request.prompt) + request.new_tokens <= engine.max_model_len for request in asked)


def _prompts(args: argparse.Namespace) -> list[Any]:
    try:
        rows = list(read_rows(args.input))[: args.limit]
    except InputError as error:
        raise CommandError(error) from None
    if not rows:
        raise CommandError(f"{args.input} holds no rows")
    prompts: list[Any] = []
    for row in rows:
        if isinstance(row, RowError):
            raise CommandError(row)
        try:
            prompts.append(row.first_prompt)
        except RowError as error:
            raise CommandError(error) from None
    return prompts


def _measure(
    engine: Engine, asked: list[Asked], args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    arrivals = poisson(len(asked), rate=args.rate, seed=args.seed)
    engine.wait_prepared()
    try:
        runs = [
            run(engine, asked, arrivals, args.params, is_streamed=args.stream)
            for _ in range(args.repeats + 1)
        ]
    except ValueError as error:
        raise CommandError(error) from None
    programs = engine.programs
    models = programs.lowering.merge(programs.leaves)
    prompt_rows = engine.config.prefill_batch_size * engine.config.prefill_chunk
    return summary(
        runs[1:],
        step_bytes=weight_bytes(models, batch_size=args.batch_size),
        prompt_bytes=weight_bytes(Models(models.target, NoDrafter()), batch_size=prompt_rows),
        bandwidth=bandwidth,
    )


def _profile(engine: Engine, asked: list[Asked], args: argparse.Namespace) -> str:
    """The device's busy time in one run, and its kernels, as text."""
    arrivals = poisson(len(asked), rate=args.rate, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(engine, asked, arrivals, args.params)
        try:
            kernels = read_kernels(Path(folder))
        except ValueError as error:
            raise CommandError(error) from None
    busy = sum(kernel.end - kernel.begin for kernel in kernels)
    whole = max(kernel.end for kernel in kernels) - kernels[0].begin
    header = f"  {busy / 1e6:.1f} of {whole / 1e6:.1f} ms busy, {len(kernels)} kernels"
    return f"{header}\n{kernel_table(kernels, args.profile)}"


def _line(row: dict[str, Any]) -> str:
    def ranks(times: dict[str, float] | None) -> list[str]:
        return [f"{time:.2f}" for time in times.values()] if times else ["-", "-"]

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    return _COLUMNS.format(
        row["name"],
        row["requests"],
        row["prompt_tokens"],
        f"{row['new_tokens']:.0f}",
        f"{row['total_ms']:.1f}",
        f"{row['tokens_per_second']:.0f}",
        *ranks(row["first_token_ms"]),
        *ranks(row["per_token_ms"]),
        *(f"{row['wait_ms'][which]:.1f}" if row["wait_ms"] else "-" for which in ("p50", "most")),
        f"{row['tokens_per_step']:.2f}",
        share(row["padding_share"]),
        share(row["idle_share"]),
        share(row["floor_share"]),
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a configuration or a checkpoint")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--k",
        type=drafts_option,
        dest="num_speculative_tokens",
        metavar="K",
        help="drafts per step, or auto (at most 4); default: 4, or the configuration's",
    )
    drafts.add_argument("--no-speculation", action="store_true", help="plain decoding")
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="N",
        help="synthetic tokens per step; default: 3 with --shape; with CONFIG drafts are verified",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run this workload; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of workloads and arrivals")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of lengths and numbers of requests")
    parser.add_argument("--input", type=Path, metavar="FILE.jsonl", help="prompts instead of the workloads")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of the file")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of an answer, for prompts of a file",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second; default: all at once")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=64, metavar="B", help="slots")
    parser.add_argument(
        "--max-model-len", type=int, default=4608, metavar="N", help="the most tokens of a request"
    )
    add_engine_option(parser)
    parser.add_argument(
        "--stream", action="store_true", help="stream answers, and time the waits between pieces"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs")
    parser.add_argument("--copy-bytes", type=int, default=1 << 31, help="size of the timed copy")
    parser.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="trace one more run on a GPU, and print its N most expensive kernels",
    )
    args = parser.parse_args(arguments)
    if (args.config is None) == (args.shape is None):
        parser.error("give either CONFIG or --shape")
    if args.input is None:
        parser.refuse(args, ["limit", "max_new_tokens"], "without --input")
    else:
        parser.refuse(args, ["scale"], "with --input")
    for name in ("repeats", "limit", "rate", "scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} must be above 0, got {value}")
    args.engine = dict(args.engine)
    try:
        args.params = SamplingParams(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, ignore_eos=True
        )
    except ValueError as error:
        parser.error(str(error))
    if not args.temperature:
        parser.refuse(args, ["top_k", "top_p"], "without --temperature")
    if args.shape is not None:
        given = args.num_speculative_tokens
        args.num_speculative_tokens = 0 if args.no_speculation else _MOST_DRAFTS if given is None else given
        if args.acceptance is None and args.num_speculative_tokens:
            args.acceptance = 3.0
    return args


if __name__ == "__main__":
    sys.exit(main())
