"""Sizes for the tests and the benchmark of `latent_attention`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call; the last row of the fullest slot is at position `context`.

    The last row of slot b is at context * (b + 1) / slots, so that contexts differ. With `empty`, slots 1,
    4, 7, … are empty. Rows see all positions before them, or `window` positions.
    """

    name: str
    slots: int
    rows: int
    heads: int
    value_dim: int
    rope_dim: int
    page_size: int
    table_width: int
    context: int
    window: int | None = None
    empty: bool = False
    dtype: str = "float32"


CASES = (
    Case("one", 1, 1, 1, 1, 1, page_size=1, table_width=1, context=0),
    Case("first token", 1, 1, 2, 16, 8, page_size=4, table_width=8, context=0),
    Case("last slot of a page", 1, 1, 3, 32, 16, page_size=16, table_width=5, context=15),
    Case("first slot of a page", 1, 5, 3, 32, 16, page_size=16, table_width=5, context=16),
    Case("full table", 2, 3, 5, 24, 8, page_size=8, table_width=20, context=159),
    Case("odd sizes, empty slots", 7, 5, 3, 40, 12, page_size=16, table_width=20, context=301, empty=True),
    Case("no context at all", 3, 2, 2, 16, 8, page_size=16, table_width=4, context=-1),
    Case("window", 3, 4, 4, 32, 16, page_size=16, table_width=64, context=1000, window=100),
    Case("pages of one", 2, 3, 2, 32, 16, page_size=1, table_width=300, context=290),
    Case("prefill", 2, 64, 4, 32, 16, page_size=16, table_width=40, context=500, dtype="bfloat16"),
    Case(
        "GLM-4.7-Flash, float32",
        2,
        4,
        20,
        512,
        64,
        page_size=16,
        table_width=64,
        context=640,
        dtype="float32",
    ),
    Case("GLM-4.7-Flash", 1, 4, 20, 512, 64, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    Case("DeepSeek-V3", 2, 4, 128, 512, 64, page_size=16, table_width=96, context=1400, dtype="bfloat16"),
)
