"""Reading a profiler trace: the kernels that ran on the device, and its idle time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData


@dataclass(frozen=True)
class Kernel:
    """One kernel on the device; times are in nanoseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Idle:
    """Idle time inside and between dispatches as shares of the trace, and its length in nanoseconds."""

    inside: float
    between: float
    length: float


def read_kernels(folder: Path) -> list[Kernel]:
    """All kernels on the streams of the first GPU, ordered by their beginning.

    Raises:
      ValueError: the trace holds no work of a GPU.
    """
    (path,) = folder.rglob("*.xplane.pb")
    kernels = [
        Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns)
        for plane in ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not kernels:
        raise ValueError(f"{path}: no GPU work in the trace; jax runs on {jax.default_backend()!r}")
    return sorted(kernels, key=lambda kernel: kernel.begin)


def idle_shares(kernels: Sequence[Kernel], num_dispatches: int) -> Idle:
    """Splits idle time into gaps inside dispatches and gaps between them.

    Every dispatch runs the same number of kernels, so the gaps between dispatches are those before every n-th
    kernel.
    """
    per_dispatch = len(kernels) // num_dispatches
    inside = between = 0.0
    busy_until = kernels[0].end
    for index, kernel in enumerate(kernels[1:], 1):
        gap = max(0.0, kernel.begin - busy_until)
        if index % per_dispatch == 0:
            between += gap
        else:
            inside += gap
        busy_until = max(busy_until, kernel.end)
    length = busy_until - kernels[0].begin
    return Idle(inside / length, between / length, length)


def kernel_table(kernels: Sequence[Kernel], rows: int, *, steps: int = 1) -> str:
    """The names with the longest total times, a line each: time per step, count per step, mean time."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel.end - kernel.begin)
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:rows]
    return "\n".join(
        f"{sum(times) / steps / 1e3:11.1f} us {len(times) / steps:9.1f} x "
        f"{sum(times) / len(times) / 1e3:8.2f} us  {name[:90]}"
        for name, times in longest
    )
