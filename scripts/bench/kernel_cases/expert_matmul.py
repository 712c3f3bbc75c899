"""Sizes for the tests and the benchmark of `expert_matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`rows` rows, each multiplied by one of `experts` weights [width, outputs]; `spread` of these are used.

    With `packed` the weights are in MXFP4; with `bits` in codes of 8 or 4 bits, in groups of 128 inputs.
    `per_input` rows after each other have the same input.
    """

    name: str
    rows: int
    experts: int
    width: int
    outputs: int
    spread: int
    dtype: str = "bfloat16"
    packed: bool = False
    bits: int = 0
    per_input: int = 1


CASES = (
    Case("one row", rows=1, experts=4, width=64, outputs=32, spread=4),
    Case("odd sizes", rows=7, experts=5, width=200, outputs=50, spread=3),
    Case("all rows one expert", rows=20, experts=8, width=96, outputs=80, spread=1),
    Case("some rows", rows=40, experts=6, width=96, outputs=70, spread=5),
    Case("more rows than a sort costs", rows=300, experts=7, width=64, outputs=70, spread=6),
    Case("more experts than chosen", rows=150, experts=40, width=96, outputs=32, spread=33),
    Case("many rows one expert", rows=200, experts=3, width=64, outputs=48, spread=1),
    Case("float32", rows=6, experts=5, width=96, outputs=80, spread=5, dtype="float32"),
    Case("shared inputs", rows=12, experts=5, width=96, outputs=80, spread=5, per_input=3),
    Case("many shared inputs", rows=300, experts=7, width=64, outputs=70, spread=6, per_input=4),
    Case("shared inputs, float32", 12, 5, width=96, outputs=80, spread=5, dtype="float32", per_input=3),
    Case("gpt-oss-20b, gate and up", rows=16, experts=32, width=2880, outputs=5760, spread=32),
    Case("gpt-oss-20b, down", rows=16, experts=32, width=2880, outputs=2880, spread=32),
    Case("gpt-oss-20b, down, batch 8", rows=128, experts=32, width=2880, outputs=2880, spread=32),
    Case("gpt-oss-20b, down, batch 32", rows=512, experts=32, width=2880, outputs=2880, spread=32),
    Case("prefill", rows=4096, experts=32, width=512, outputs=512, spread=32),
    Case("GLM-4.7-Flash, gate and up", rows=16, experts=64, width=2048, outputs=3072, spread=64),
    Case("one row, packed", rows=1, experts=4, width=64, outputs=32, spread=4, packed=True),
    Case("odd sizes, packed", rows=7, experts=5, width=224, outputs=50, spread=3, packed=True),
    Case("one expert, packed", rows=20, experts=8, width=96, outputs=80, spread=1, packed=True),
    Case("some rows, packed", rows=40, experts=6, width=288, outputs=70, spread=5, packed=True),
    Case("many rows, packed", rows=300, experts=7, width=64, outputs=70, spread=6, packed=True),
    Case("shared inputs, packed", 12, 5, width=96, outputs=70, spread=5, packed=True, per_input=4),
    *(
        Case(f"gpt-oss-20b, {name}, {rows} rows, packed", rows, 32, 2880, outputs, 32, packed=True)
        for rows in (4, 16, 128)
        for name, outputs in (("gate and up", 5760), ("down", 2880))
    ),
    Case("gpt-oss-20b, down, 512 rows, packed", 512, 32, 2880, 2880, 32, packed=True),
    Case("odd sizes, FP8", rows=7, experts=5, width=256, outputs=50, spread=3, bits=8),
    Case("some rows, INT4", rows=40, experts=6, width=512, outputs=70, spread=5, bits=4),
    Case("many rows, FP8", rows=300, experts=7, width=128, outputs=70, spread=6, bits=8),
    *(
        Case(
            f"Qwen3-30B, {name}, {rows} rows, {form}", rows, 128, width, outputs, 128, bits=bits, per_input=n
        )
        for rows in (32, 256)
        for name, width, outputs, n in (("gate and up", 2048, 1536, 8), ("down", 768, 2048, 1))
        for form, bits in (("FP8", 8), ("INT4", 4))
    ),
    Case("prefill, packed", rows=4096, experts=32, width=512, outputs=512, spread=32, packed=True),
)
GATED = (
    Case("odd sizes", rows=7, experts=5, width=200, outputs=100, spread=3),
    Case("float32", rows=6, experts=5, width=96, outputs=80, spread=5, dtype="float32"),
    Case("odd sizes, packed", rows=7, experts=5, width=224, outputs=100, spread=3, packed=True),
    Case("odd sizes, FP8", rows=7, experts=5, width=256, outputs=100, spread=3, bits=8),
    Case("some rows, INT4", rows=40, experts=6, width=512, outputs=140, spread=5, bits=4),
    Case("many shared inputs, FP8", 300, 7, width=128, outputs=140, spread=6, bits=8, per_input=4),
    Case("many rows, INT4", rows=300, experts=7, width=512, outputs=384, spread=6, bits=4),
    *(
        Case(f"Qwen3-30B, {rows} rows, {form}", rows, 128, 2048, 1536, 128, bits=bits, per_input=8)
        for rows in (32, 256)
        for form, bits in (("FP8", 8), ("INT4", 4))
    ),
)
"""Of `gated_expert_matmul`; outputs are those of gate and up."""
