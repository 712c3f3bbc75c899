"""Time the engine's step at real shapes, against the bytes that it must read.

    python scripts/bench_step.py --shape llama3-8b --k 3 --batch 1,8,32 [--acceptance 3.0] [--context N]
        [--temperature T,T,...] [--top-k K] [--top-p P] [--params JSON] [--no-speculation]
        [--tensor-parallel N] [--gpu-activations DTYPE] [--exact] [--json FILE]

Weights are random and acceptance is synthetic, so the text is meaningless but the work is real. Dispatches
are enqueued back to back; times are the median of several runs over the whole answer. "share" is the floor as
a share of the time. Over several devices, bytes are those of one device, and memory is listed for each.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.program import Running, add_program_options, network, start_program
from bench.script import new_parser, numbers, run_script
from bench.traffic import cache_bytes, copy_bandwidth, weight_bytes

from jaxspec.sampling import SamplingParams

_COLUMNS = "{:>6} {:>5} {:>8} {:>8} {:>9} {:>9} {:>8} {:>7} {:>8} {:>9} {:>8}"


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    bandwidth = copy_bandwidth(args.copy_bytes)
    mesh, models = network(args, split_drafter=not args.whole_drafter)
    num_drafts, dtype = models.drafter.num_speculative_tokens, jnp.dtype(args.dtype)
    devices = f" on {mesh.size} devices" if mesh.size > 1 else ""
    print(f"{args.shape}, K={num_drafts}, {args.dtype}{devices}: copy {bandwidth / 1e12:.2f} TB/s")
    print(
        _COLUMNS.format(
            "batch",
            "T",
            "ms/step",
            "floor ms",
            "tokens/s",
            "tok/step",
            "GB/step",
            "share",
            "disp/st",
            "host us",
            "mem GB",
        )
    )
    compile_for = partial(
        start_program,
        args,
        models,
        mesh,
        # A margin, because acceptance is random and the last dispatch runs past the end.
        new_tokens=2 * args.new_tokens + 8 * args.steps_per_dispatch,
        max_model_len=max(args.max_model_len, args.context + 4 * args.new_tokens + 1024),
        page_size=args.page_size,
    )
    cases = list(product(args.params, args.batch))
    # Compile all programs in parallel before timing any.
    with ThreadPoolExecutor(len(cases)) as pool:
        programs = list(pool.map(lambda case: compile_for(params=case[0], batch_size=case[1]), cases))
    rows = []
    for (params, batch_size), running in zip(cases, programs, strict=True):
        row = _measure(running, args, tokens_per_step=args.acceptance if num_drafts else 1.0)
        cache = cache_bytes(
            models,
            batch_size=batch_size,
            context=args.context + args.new_tokens // 2,
            itemsize=dtype.itemsize,
            is_coded=args.cache_dtype == "float8_e4m3fn",
            devices=mesh.size,
        )
        row |= {"batch": batch_size, "temperature": params.temperature}
        row["bytes_per_step"] = weight_bytes(models, batch_size=batch_size) + cache
        row["floor_ms"] = row["bytes_per_step"] / bandwidth * 1e3
        row["bandwidth_share"] = row["floor_ms"] / row["step_ms"]
        rows.append(row)
        print(
            _COLUMNS.format(
                batch_size,
                f"{params.temperature:g}",
                f"{row['step_ms']:.3f}",
                f"{row['floor_ms']:.3f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_step']:.2f}",
                f"{row['bytes_per_step'] / 1e9:.3f}",
                f"{row['bandwidth_share']:.1%}",
                f"{row['dispatches_per_step']:.3f}",
                f"{row['host_us_per_step']:.1f}",
                "/".join(f"{peak / 1e9:.1f}" for peak in row["peak_bytes"] if peak) or "-",
            ),
            flush=True,
        )
    result = {
        "shape": args.shape,
        "num_drafts": num_drafts,
        "exact": args.exact,
        "cache_dtype": args.cache_dtype or args.dtype,
        "gpu_activations": args.gpu_activations,
        "tensor_parallel": mesh.size,
        "whole_drafter": args.whole_drafter,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "params": args.fields,
        "context": args.context,
        "new_tokens": args.new_tokens,
        "copy_bandwidth": bandwidth,
        "rows": rows,
    }
    return result, 0


def _measure(running: Running, args: argparse.Namespace, *, tokens_per_step: float) -> dict[str, Any]:
    num_dispatches = max(1, round(args.new_tokens / tokens_per_step / args.steps_per_dispatch))
    steps = num_dispatches * args.steps_per_dispatch
    step_times, host_times, emitted = [], [], 0.0
    for run in range(args.runs + 1):
        running.rewind()
        jax.block_until_ready(running.state)
        begin = time.perf_counter()
        outputs = [running.enqueue() for _ in range(num_dispatches)]
        enqueued = time.perf_counter()
        jax.block_until_ready((outputs, running.state))
        if run:  # the first one warms up
            step_times.append((time.perf_counter() - begin) / steps)
            host_times.append((enqueued - begin) / steps)
        emitted = float(np.mean([running.read(output).num_tokens for output in outputs]))
    step = statistics.median(step_times)
    memory = [device.memory_stats() or {} for device in running.programs.mesh.devices.flat]
    return {
        "step_ms": step * 1e3,
        "step_ms_runs": [t * 1e3 for t in step_times],
        "tokens_per_step": emitted,
        "tokens_per_second": emitted * running.state.length.size / step,
        "dispatches_per_step": 1 / args.steps_per_dispatch,
        "host_us_per_step": statistics.median(host_times) * 1e6,
        "peak_bytes": [stats.get("peak_bytes_in_use") for stats in memory],
        "temporary_bytes": running.compiled.memory_analysis().temp_size_in_bytes,
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_program_options(parser, context=128, steps_per_dispatch=8)
    parser.add_argument("--batch", type=numbers(), default=[1, 8, 32], metavar="B,B,...", help="slots")
    parser.add_argument(
        "--temperature",
        type=numbers(float),
        default=[0.0],
        metavar="T,T,...",
        help="0 times the greedy program",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="0 with --top-p 1 times the program without top-k and top-p"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--params",
        dest="fields",
        type=json.loads,
        default={},
        metavar="JSON",
        help='further fields of SamplingParams, for example {"presence_penalty": 1}',
    )
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens of the answer")
    parser.add_argument("--max-model-len", type=int, default=8192, help="positions of the page table")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--whole-drafter", action="store_true", help="put the whole drafter on every device")
    parser.add_argument("--runs", type=int, default=3, help="timed runs")
    parser.add_argument("--copy-bytes", type=int, default=1 << 31, help="size of the timed copy")
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["k", "acceptance", "whole_drafter"], "with --no-speculation")
    try:
        args.params = [
            SamplingParams(
                **{"temperature": temperature, "top_k": args.top_k, "top_p": args.top_p, **args.fields}
            )
            for temperature in args.temperature
        ]
    except ValueError as error:
        parser.error(str(error))
    if not any(args.temperature):
        parser.refuse(args, ["top_k", "top_p"], "without --temperature")
    return args


if __name__ == "__main__":
    sys.exit(main())
