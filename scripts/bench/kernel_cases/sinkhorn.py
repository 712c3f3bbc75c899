"""Sizes for the tests and the benchmark of `sinkhorn`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`rows` matrices of size x size."""

    name: str
    rows: int
    size: int = 4
    iterations: int = 20
    eps: float = 1e-6


CASES = (
    Case("one", 1),
    Case("odd", 37, iterations=3, eps=1e-2),
    Case("one iteration", 33, size=2, iterations=1),
    Case("no power of two", 5, size=3),
    Case("sixteen streams", 7, size=16, iterations=5),
    Case("DeepSeek-V4, four rows", 4),
    Case("DeepSeek-V4, a prompt", 2048),
)
