"""Sizes for the tests and the benchmark of `indexed_attention`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call; the last row of the fullest slot is at position `context`.

    The last row of slot b is at context * (b + 1) / slots, so that contexts differ. With `empty`, slots 1,
    4, 7, … are empty. A ratio of 1 means no compressed entries.
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
    window: int
    ratio: int
    empty: bool = False
    dtype: str = "float32"


CASES = (
    Case("one", 1, 1, 1, 1, 1, page_size=1, table_width=1, context=0, window=1, ratio=1),
    Case("no entry yet", 1, 3, 2, 2, 8, page_size=4, table_width=2, context=2, window=2, ratio=4),
    Case("an entry's last row", 2, 5, 2, 2, 8, page_size=8, table_width=4, context=31, window=3, ratio=8),
    Case("the row after it", 2, 5, 2, 2, 8, page_size=8, table_width=5, context=32, window=3, ratio=8),
    Case("full table", 2, 3, 2, 3, 8, page_size=8, table_width=20, context=159, window=8, ratio=4),
    Case(
        "odd, empty slots",
        7,
        5,
        3,
        3,
        5,
        page_size=6,
        table_width=20,
        context=101,
        window=7,
        ratio=3,
        empty=True,
    ),
    Case("no context at all", 3, 2, 1, 2, 8, page_size=4, table_width=4, context=-1, window=5, ratio=2),
    Case("window of all", 2, 4, 2, 2, 8, page_size=4, table_width=9, context=30, window=64, ratio=4),
    Case("window alone", 3, 4, 2, 4, 16, page_size=16, table_width=64, context=1000, window=100, ratio=1),
    Case("several blocks", 2, 4, 1, 4, 16, page_size=4, table_width=300, context=1100, window=16, ratio=2),
    Case(
        "prefill",
        2,
        64,
        2,
        2,
        16,
        page_size=16,
        table_width=40,
        context=500,
        window=32,
        ratio=4,
        dtype="bfloat16",
    ),
)
