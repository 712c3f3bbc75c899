"""Check the kernels against their references, and time both against the floor.

    python scripts/bench_kernels.py [--op NAME] [--json FILE]

The floor is the time to move a call's bytes at the measured bandwidth of a copy. If a case fails, its kernel
is not timed, and the exit status is 1. Calls alternate between sets of arguments, so that these are not in a
cache. Kernels are written in Triton for GPUs and in Numba for CPUs.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.kernel_calls import Call, all_calls
from bench.script import new_parser, run_script
from bench.traffic import copy_bandwidth

from jaxspec.commands.command_line import CommandError

# Larger than the L2 cache of any GPU and the L3 cache of most CPUs.
_ROTATED_BYTES = 1 << 27
# Passing arguments and results takes the host longer than a small call, so these are repeated in a program.
_SMALL_BYTES, _REPEATS = 1 << 20, 32
_COLUMNS = "{:16} {:28} {:>9} {:>9} {:>9} {:>7}"


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    kernel = "triton" if jax.default_backend() == "gpu" else "numba"
    known = list(all_calls())
    offered = [call for call in known if args.op in (None, call.op.name)]
    if not offered:
        names = dict.fromkeys(call.op.name for call in known)
        raise CommandError(f"--op: {args.op!r} is unknown; known: {', '.join(names)}")
    reasons = {call.op.name: call.op.why_not(kernel) for call in offered}
    if all(reasons.values()):
        raise CommandError("; ".join(f"{name}: the {kernel} kernel {why}" for name, why in reasons.items()))
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    print(_COLUMNS.format("operation", "case", f"{kernel} us", "xla us", "floor us", "share"))
    rows, failed = [], False
    for name, calls in groupby(offered, key=lambda call: call.op.name):
        cases = [call for call in calls if call.bytes_moved and not reasons[name]]
        wrong = [line for call in cases if (line := _check(call, kernel))]
        for line in wrong:
            print(line, file=sys.stderr)
        failed |= bool(wrong)
        for call in [] if wrong else cases:
            times = {kind: _time(call, kind) for kind in (kernel, "xla")}
            floor = call.bytes_moved / bandwidth
            row = {"op": name, "case": call.name, "floor_us": floor * 1e6}
            rows.append(row | {f"{kind}_us": seconds * 1e6 for kind, seconds in times.items()})
            numbers = (f"{x * 1e6:.2f}" for x in (times[kernel], times["xla"], floor))
            print(_COLUMNS.format(name, call.name, *numbers, f"{floor / times[kernel]:.0%}"), flush=True)
    return {"copy_bandwidth": bandwidth, "rows": rows}, int(failed)


def _check(call: Call, kernel: str) -> str | None:
    """Compares a case with its reference; returns what is wrong, or None."""
    results = [
        call.compared(jax.jit(partial(call.op, **call.static, implementation=kind))(*call.arguments(0)))
        for kind in (kernel, "xla")
    ]
    for mine, reference in zip(*map(jax.tree.leaves, results), strict=True):
        ours, theirs = np.asarray(mine, np.float64), np.asarray(reference, np.float64)
        error = float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30)
        # Integers are ids, which must be equal.
        bound = call.bound if jnp.issubdtype(mine.dtype, jnp.inexact) else 0.0
        if not error <= bound:
            return f"{call.op.name}, {call.name}: error {error:.2e}, allowed {bound:.0e}; not timed"
    return None


def _time(call: Call, implementation: str) -> float:
    """Seconds per call: the least of five measurements over alternating arguments."""
    first = call.arguments(0)
    size = sum(array.nbytes for array in jax.tree.leaves(first))
    small = size < _SMALL_BYTES and not call.in_place and jax.default_backend() == "gpu"
    repeats = _REPEATS if small else 1
    count = 1 if repeats > 1 else max(4, min(32, _ROTATED_BYTES // size))
    sets = [first, *(call.arguments(seed) for seed in range(1, count))]
    op: Callable[..., Any] = partial(call.op, **call.static, implementation=implementation)
    buffers = [arrays[: call.in_place] for arrays in sets]
    rest = [arrays[call.in_place :] for arrays in sets]

    def calls(buffers: list[tuple], rest: list[tuple]) -> tuple[list, list]:
        outputs: list[Any] = []
        for mine, others in list(zip(buffers, rest, strict=True)) * repeats:
            if repeats > 1:
                # Runs calls one after another, since XLA would fuse or merge small independent ones.
                others, outputs = jax.lax.optimization_barrier((others, outputs))
            outputs.append(op(*mine, *others))
        if repeats > 1:
            return buffers, [sum(jnp.ravel(x)[0] for x in jax.tree.leaves(outputs))]
        if not call.in_place:
            return buffers, outputs
        outputs = [output if isinstance(output, tuple) else (output,) for output in outputs]
        updated = [output[: call.in_place] for output in outputs]
        return updated, [output[call.in_place :] for output in outputs]

    compiled = jax.jit(calls, donate_argnums=0).lower(buffers, rest).compile()
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(10):
            buffers, outputs = compiled(buffers, rest)
        jax.block_until_ready((buffers, outputs))
        times.append((time.perf_counter() - begin) / 10 / (count * repeats))
    return min(times[1:])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--op", help="only this operation")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
