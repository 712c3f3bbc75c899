"""Sizes for the tests and the benchmark of `slot_mapping` and `place_rows`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call. `start` is the position of every slot's first row; only `place_rows` uses `window`."""

    name: str
    slots: int
    rows: int
    table_width: int
    page_size: int
    start: int
    window: int | None = None


CASES = (
    Case("one", slots=1, rows=1, table_width=1, page_size=1, start=0),
    Case("no rows", slots=2, rows=0, table_width=2, page_size=4, start=0),
    Case("ends at a page's last slot", slots=3, rows=5, table_width=4, page_size=16, start=11),
    Case("starts at a page's first slot", slots=3, rows=5, table_width=4, page_size=16, start=16),
    Case("crosses two pages", slots=2, rows=9, table_width=5, page_size=4, start=3, window=5),
    Case("odd page size", slots=5, rows=3, table_width=3, page_size=7, start=6),
    Case("runs past the table", slots=2, rows=6, table_width=2, page_size=4, start=5),
    Case("starts below zero", slots=2, rows=4, table_width=2, page_size=4, start=-2, window=2),
    Case("prefill chunk", slots=4, rows=128, table_width=32, page_size=16, start=200),
    Case("draft", slots=1, rows=1, table_width=512, page_size=16, start=4000),
    Case("decode", slots=32, rows=4, table_width=512, page_size=16, start=4000),
    Case("decode, window", slots=32, rows=4, table_width=512, page_size=16, start=4000, window=128),
)
