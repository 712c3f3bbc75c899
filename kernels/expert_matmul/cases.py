"""Sizes for the tests and the benchmark of `expert_matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`rows` rows, each with one of `experts` weights [width, outputs], of which it uses `spread`."""

    name: str
    rows: int
    experts: int
    width: int
    outputs: int
    spread: int
    dtype: str = "bfloat16"


CASES = (
    Case("one row", rows=1, experts=4, width=64, outputs=32, spread=4),
    Case("odd sizes", rows=7, experts=5, width=200, outputs=50, spread=3),
    Case("all rows one expert", rows=20, experts=8, width=96, outputs=80, spread=1),
    Case("float32", rows=6, experts=5, width=96, outputs=80, spread=5, dtype="float32"),
    Case("gpt-oss-20b, gate and up", rows=16, experts=32, width=2880, outputs=5760, spread=32),
    Case("gpt-oss-20b, down", rows=16, experts=32, width=2880, outputs=2880, spread=32),
    Case("gpt-oss-20b, down, batch 8", rows=128, experts=32, width=2880, outputs=2880, spread=32),
    Case("GLM-4.7-Flash, gate and up", rows=16, experts=64, width=2048, outputs=3072, spread=64),
)
