"""Sizes for the tests and the benchmark of `latent_write`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call on a cache [pages, 1, 1, page_size, size]."""

    name: str
    slots: int
    rows: int
    pages: int
    page_size: int
    size: int
    dtype: str = "float32"


CASES = (
    Case("one", slots=1, rows=1, pages=2, page_size=1, size=1),
    Case("no rows", slots=2, rows=0, pages=3, page_size=4, size=8),
    Case("odd sizes", slots=3, rows=5, pages=7, page_size=5, size=7),
    Case("fills every page", slots=1, rows=12, pages=4, page_size=4, size=24),
    Case("GLM-4.7-Flash", slots=32, rows=4, pages=33, page_size=16, size=576, dtype="bfloat16"),
    Case("GLM-4.7-Flash, float32", slots=1, rows=4, pages=33, page_size=16, size=576),
)
