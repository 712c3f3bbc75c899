"""Sizes for the tests and the benchmark of `rope_kv_write`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call on a cache [pages, kv_heads, 2, page_size, head_dim]."""

    name: str
    slots: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str = "float32"


CASES = (
    Case("one", slots=1, rows=1, kv_heads=1, group=1, head_dim=2, page_size=1, pages=2),
    Case("no rows", slots=2, rows=0, kv_heads=2, group=2, head_dim=8, page_size=4, pages=3),
    Case("odd sizes", slots=3, rows=5, kv_heads=3, group=3, head_dim=14, page_size=8, pages=4),
    Case("135M", 1, 5, kv_heads=3, group=3, head_dim=64, page_size=16, pages=65, dtype="bfloat16"),
    Case("135M, batch 32", 32, 5, kv_heads=3, group=3, head_dim=64, page_size=16, pages=33, dtype="bfloat16"),
    Case("8B", 1, 4, kv_heads=8, group=4, head_dim=128, page_size=16, pages=65, dtype="bfloat16"),
    Case("8B, batch 32", 32, 4, kv_heads=8, group=4, head_dim=128, page_size=16, pages=33, dtype="bfloat16"),
)
