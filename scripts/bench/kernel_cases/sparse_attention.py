"""Sizes for the tests and the benchmark of `sparse_attention`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call. Rows see up to `window` slots and up to `entries` entries, of which there are `per_page` in a
    page; the last row of the last slot sees all of them. With `shared`, the rows of a slot list the same
    entries. With `empty`, slots 1, 4, 7, … see nothing.
    """

    name: str
    slots: int
    rows: int
    heads: int
    head_dim: int
    page_size: int
    window: int
    entries: int
    per_page: int = 1
    shared: bool = False
    empty: bool = False
    dtype: str = "float32"


CASES = (
    Case("one", 1, 1, 1, 1, page_size=1, window=1, entries=0),
    Case("window alone", 3, 4, 8, 16, page_size=16, window=100, entries=0),
    Case("one entry a page", 2, 5, 4, 8, page_size=8, window=3, entries=7, shared=True),
    Case("odd, empty slots", 7, 5, 9, 5, page_size=6, window=7, entries=33, per_page=2, empty=True),
    Case("whole blocks", 2, 2, 3, 8, page_size=16, window=128, entries=256, per_page=4),
    Case("several blocks", 2, 3, 4, 16, page_size=16, window=129, entries=300, per_page=4, shared=True),
    Case("many heads", 1, 2, 70, 8, page_size=4, window=20, entries=30),
    Case("DeepSeek-V4-Flash", 1, 4, 64, 512, 64, window=128, entries=512, per_page=16, dtype="bfloat16"),
    Case("prefill", 2, 48, 4, 16, page_size=16, window=32, entries=40, per_page=4, dtype="bfloat16"),
)
