"""Sizes for the tests and the benchmark of `rms_matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """[rows, width] times [width, outputs], or [width, 2, outputs] where `gated`."""

    name: str
    rows: int
    width: int
    outputs: int
    gated: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case("one row", rows=1, width=64, outputs=32),
    Case("odd sizes", rows=7, width=200, outputs=50),
    Case("odd sizes, gated", rows=19, width=200, outputs=50, gated=True),
    Case("float32", rows=5, width=576, outputs=96, gated=True, dtype="float32"),
    Case("135M attention", rows=5, width=576, outputs=960),
    Case("135M feed-forward", rows=5, width=576, outputs=1536, gated=True),
    Case("135M feed-forward, batch 8", rows=40, width=576, outputs=1536, gated=True),
    Case("135M feed-forward, batch 32", rows=160, width=576, outputs=1536, gated=True),
    Case("8B attention", rows=4, width=4096, outputs=6144),
    Case("8B feed-forward", rows=4, width=4096, outputs=14336, gated=True),
    Case("8B feed-forward, batch 8", rows=32, width=4096, outputs=14336, gated=True),
)
