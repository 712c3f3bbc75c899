"""Sizes for the tests and the benchmark of `paged_attention`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call; the last row of the fullest slot is at position `context`.

    The last row of slot b is at context * (b + 1) / slots, so that contexts differ. With `empty`, slots 1,
    4, 7, … are empty.
    """

    name: str
    slots: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    table_width: int
    context: int
    window: int | None = None
    empty: bool = False
    sinks: bool = False
    dtype: str = "float32"


CASES = (
    Case("one", 1, 1, 1, 1, 16, page_size=1, table_width=1, context=0),
    Case("first token", 1, 1, 2, 2, 8, page_size=4, table_width=8, context=0),
    Case("last slot of a page", 1, 1, 2, 2, 64, page_size=16, table_width=5, context=15),
    Case("first slot of a page", 1, 5, 2, 2, 64, page_size=16, table_width=5, context=16),
    Case("full table", 2, 3, 2, 2, 32, page_size=8, table_width=20, context=159),
    Case("odd sizes, empty slots", 7, 5, 3, 3, 80, page_size=16, table_width=20, context=301, empty=True),
    Case("no context at all", 3, 2, 1, 2, 64, page_size=16, table_width=4, context=-1),
    Case("window", 3, 4, 2, 4, 64, page_size=16, table_width=64, context=1000, window=100),
    Case("window of one", 2, 4, 2, 4, 64, page_size=16, table_width=64, context=600, window=1),
    Case(
        "sinks, empty slots",
        4,
        3,
        2,
        4,
        64,
        page_size=16,
        table_width=64,
        context=900,
        empty=True,
        sinks=True,
    ),
    Case(
        "sinks, one split", 70, 5, 4, 4, 64, page_size=16, table_width=9, context=130, window=50, sinks=True
    ),
    Case("pages of one", 2, 3, 2, 2, 64, page_size=1, table_width=300, context=290),
    Case("pages of 256", 2, 3, 2, 2, 64, page_size=256, table_width=8, context=2000),
    Case("K = 15", 3, 16, 2, 4, 128, page_size=16, table_width=80, context=1203, dtype="bfloat16"),
    Case("prefill", 2, 64, 2, 4, 64, page_size=16, table_width=40, context=500, dtype="bfloat16"),
    Case("prefill, float32", 2, 64, 3, 3, 64, page_size=16, table_width=40, context=500),
    Case("135M", 1, 5, 3, 3, 64, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    Case("135M, batch 32", 32, 5, 3, 3, 64, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    Case("135M, float32", 3, 5, 3, 3, 64, page_size=16, table_width=512, context=640),
    Case("8B, one row", 1, 1, 8, 4, 128, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    Case("8B", 1, 4, 8, 4, 128, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    Case("8B, batch 32", 32, 4, 8, 4, 128, page_size=16, table_width=512, context=640, dtype="bfloat16"),
    # With bfloat16, sizes of tiles and splits depend on the number of tiles of rows.
    Case("8B, batch 16", 16, 4, 8, 4, 128, page_size=16, table_width=80, context=1203, dtype="bfloat16"),
    Case("8B, batch 64", 64, 4, 8, 4, 128, page_size=16, table_width=40, context=600, dtype="bfloat16"),
    Case("8B, K = 7", 32, 8, 8, 4, 128, page_size=16, table_width=80, context=1203, dtype="bfloat16"),
    Case("8B, K = 15", 32, 16, 8, 4, 128, page_size=16, table_width=80, context=1203, dtype="bfloat16"),
    Case("256 tiles, long", 16, 5, 16, 2, 16, page_size=64, table_width=136, context=8700, dtype="bfloat16"),
    Case(
        "GPT-OSS, batch 32",
        32,
        2,
        8,
        8,
        64,
        page_size=16,
        table_width=40,
        context=630,
        window=128,
        empty=True,
        sinks=True,
        dtype="bfloat16",
    ),
    Case(
        "GPT-OSS, K = 3",
        33,
        4,
        8,
        8,
        64,
        page_size=16,
        table_width=40,
        context=630,
        sinks=True,
        dtype="bfloat16",
    ),
    Case("8B, 16k", 8, 4, 8, 4, 128, page_size=16, table_width=1064, context=16384, dtype="bfloat16"),
    Case("8B, 32k", 1, 4, 8, 4, 128, page_size=16, table_width=2048, context=32767, dtype="bfloat16"),
)
