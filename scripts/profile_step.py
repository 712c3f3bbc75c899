"""Trace the engine's step on a GPU, and show where its time goes.

    python scripts/profile_step.py --shape smollm2-135m --k 4 --batch 1 [--tensor-parallel N] [--exact]
        [--cache-dtype DTYPE] [--gpu-activations DTYPE] [--trace FOLDER] [--graphs]

Prints the most expensive kernels with their time and count per step, and the share of idle time inside
dispatches and between them. XLA launches kernels one by one while tracing; with --graphs it keeps its CUDA
graphs, as in normal runs. Over several devices, the kernels are those of the first.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import jax
from bench.program import add_program_options, network, start_program
from bench.timeline import idle_shares, kernel_table, read_kernels

from jaxspec.commands.command_line import Parser, report
from jaxspec.sampling import SamplingParams


def main(arguments: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    if args.graphs:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_enable_command_buffers_during_profiling=true"
    mesh, models = network(args)
    num_drafts = models.drafter.num_speculative_tokens
    running = start_program(
        args,
        models,
        mesh,
        batch_size=args.batch,
        new_tokens=(num_drafts + 1) * args.steps_per_dispatch * (args.dispatches + 2),
        max_model_len=max(8192, 2 * args.context),
        page_size=16,
        params=SamplingParams(),
    )
    jax.block_until_ready([running.enqueue() for _ in range(2)])
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or Path(temporary)
        with jax.profiler.trace(folder):
            jax.block_until_ready([running.enqueue() for _ in range(args.dispatches)])
        try:
            kernels = read_kernels(folder)
        except ValueError as error:
            return report(error)
    idle = idle_shares(kernels, args.dispatches)
    steps = args.dispatches * args.steps_per_dispatch
    print(
        f"{args.shape}, K={num_drafts}, batch {args.batch}: {idle.length / steps / 1e6:.3f} ms a step, "
        f"{len(kernels) / steps:.1f} kernels a step; idle {idle.inside:.1%} inside a dispatch, "
        f"{idle.between:.1%} between two"
    )
    print(kernel_table(kernels, args.top, steps=steps))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_program_options(parser, context=384, steps_per_dispatch=4)
    parser.add_argument("--batch", type=int, default=1, help="slots")
    parser.add_argument("--dispatches", type=int, default=5, help="dispatches to trace")
    parser.add_argument("--graphs", action="store_true", help="keep CUDA graphs while tracing")
    parser.add_argument("--top", type=int, default=25, help="number of kernels to print")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep the trace here")
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["k", "acceptance"], "with --no-speculation")
    return args


if __name__ == "__main__":
    sys.exit(main())
