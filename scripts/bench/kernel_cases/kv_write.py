"""Sizes for the tests and the benchmark of `kv_write`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call on a cache [pages, kv_heads, 2, page_size, head_dim]."""

    name: str
    slots: int
    rows: int
    pages: int
    kv_heads: int
    page_size: int
    head_dim: int
    dtype: str = "float32"


CASES = (
    Case("one", slots=1, rows=1, pages=2, kv_heads=1, page_size=1, head_dim=1),
    Case("no rows", slots=2, rows=0, pages=3, kv_heads=2, page_size=4, head_dim=8),
    Case("odd sizes", slots=3, rows=5, pages=7, kv_heads=3, page_size=5, head_dim=7),
    Case("fills every page", slots=1, rows=12, pages=4, kv_heads=2, page_size=4, head_dim=8),
    Case("bfloat16", slots=2, rows=3, pages=5, kv_heads=2, page_size=4, head_dim=8, dtype="bfloat16"),
    Case("135M decode", slots=1, rows=5, pages=65, kv_heads=3, page_size=16, head_dim=64),
    Case("8B decode", slots=32, rows=4, pages=33, kv_heads=8, page_size=16, head_dim=128, dtype="bfloat16"),
)
