"""Reading a profiler trace: what ran on the device, and how long it stood idle."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData


@dataclass(frozen=True)
class Kernel:
    """One stretch of work on the device, in nanoseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Idle:
    """Idle shares of the traced stretch, and its length in nanoseconds."""

    inside: float
    between: float
    length: float


def read_kernels(folder: Path) -> list[Kernel]:
    """Everything that ran on the streams of the first GPU, in order.

    Raises:
      ValueError: the trace holds no GPU work.
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
    """Splits the idle time into what lies inside a dispatch and what lies between two.

    Every dispatch runs the same program, so the gaps between them are the ones that start at the same
    place of the sequence.
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


def time_by_name(kernels: Sequence[Kernel]) -> list[tuple[str, int, float]]:
    """Name, count and nanoseconds in total of every kind of kernel, the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel.end - kernel.begin)
    return sorted(((name, len(times), sum(times)) for name, times in found.items()), key=lambda row: -row[2])
