"""Sizes for the tests and the benchmark of `matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """[rows, width] times [width, outputs].

    `packed` is the form of a `PackedWeight` with these `activations`; empty for a dense weight of `dtype`.
    """

    name: str
    rows: int
    width: int
    outputs: int
    dtype: str = "float32"
    packed: str = ""
    activations: str = "float32"


CASES = (
    Case("a small weight", rows=1, width=64, outputs=32),
    Case("one row", rows=1, width=576, outputs=960),
    Case("odd sizes", rows=3, width=579, outputs=1037),
    Case("135M feed-forward", rows=5, width=576, outputs=3072),
    Case("135M feed-forward, down", rows=5, width=1536, outputs=576),
    Case("eight rows", rows=8, width=1536, outputs=576),
    Case("nine rows", rows=9, width=576, outputs=960),
    Case("bfloat16", rows=5, width=576, outputs=3072, dtype="bfloat16"),
    Case("135M feed-forward, one row", rows=1, width=576, outputs=3072),
    Case("135M feed-forward, one row, Q4_1", rows=1, width=576, outputs=3072, packed="uint8"),
    Case("135M feed-forward, Q4_1", rows=5, width=576, outputs=3072, packed="uint8"),
    Case("135M feed-forward, Q8_0", rows=5, width=576, outputs=3072, packed="int8"),
    Case("135M feed-forward, bfloat16 weight", rows=5, width=576, outputs=3072, packed="bfloat16"),
    *(
        Case(
            f"135M feed-forward, {name}, int8, {rows} rows", rows, 576, 3072, packed=form, activations="int8"
        )
        for name, form in (("Q4_1", "uint8"), ("Q8_0", "int8"))
        for rows in (1, 5, 64)
    ),
)
