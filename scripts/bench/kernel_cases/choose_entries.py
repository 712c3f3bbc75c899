"""Sizes for the tests and the benchmark of `choose_entries`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call. Rows may see up to `entries` entries, of which there are `per_page` in a page, and choose
    `keep`; the last row of the last slot may see all of them. With `empty`, slots 1, 4, 7, … have none. With
    `ties`, many scores are equal, and many are zeros of either sign.
    """

    name: str
    slots: int
    rows: int
    heads: int
    head_dim: int
    entries: int
    keep: int
    per_page: int = 4
    empty: bool = False
    ties: bool = False
    dtype: str = "float32"


CASES = (
    Case("one", 1, 1, 1, 1, entries=1, keep=1),
    Case("all of them", 2, 3, 4, 8, entries=12, keep=12),
    Case("odd, empty slots", 7, 5, 3, 5, entries=37, keep=6, per_page=3, empty=True),
    Case("several blocks", 2, 3, 4, 16, entries=300, keep=40),
    Case("ties", 3, 4, 2, 3, entries=290, keep=50, ties=True),
    Case("thousands", 1, 2, 1, 5, entries=5000, keep=70),
    Case("tens of thousands", 1, 2, 1, 5, entries=40000, keep=513, ties=True),
    Case("DeepSeek-V4-Flash", 1, 4, 64, 128, entries=2304, keep=512, dtype="bfloat16"),
    Case("prefill", 2, 48, 8, 16, entries=60, keep=16, dtype="bfloat16"),
)
