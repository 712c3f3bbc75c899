"""Sizes for the tests and the benchmark of `matmul_add`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """[rows, width] times [width, outputs]."""

    name: str
    rows: int
    width: int
    outputs: int
    dtype: str = "bfloat16"


CASES = (
    Case("one row", rows=1, width=64, outputs=32),
    Case("odd sizes", rows=7, width=200, outputs=50),
    Case("float32", rows=5, width=576, outputs=96, dtype="float32"),
    Case("135M attention", rows=5, width=576, outputs=576),
    Case("135M feed-forward", rows=5, width=1536, outputs=576),
    Case("135M feed-forward, batch 8", rows=40, width=1536, outputs=576),
    Case("135M feed-forward, batch 32", rows=160, width=1536, outputs=576),
    Case("8B attention", rows=4, width=4096, outputs=4096),
    Case("8B feed-forward", rows=4, width=14336, outputs=4096),
    Case("8B feed-forward, batch 8", rows=32, width=14336, outputs=4096),
)
