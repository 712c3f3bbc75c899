"""Sizes for the tests and the benchmark of `gumbel_sample`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call, which writes column `step` of `drafts` columns."""

    name: str
    slots: int
    drafts: int
    step: int
    vocabulary: int


CASES = (
    Case("one", slots=1, drafts=1, step=0, vocabulary=1),
    Case("two tokens", slots=3, drafts=2, step=1, vocabulary=2),
    Case("odd vocabulary", slots=5, drafts=3, step=1, vocabulary=1001),
    Case("one below a block", slots=2, drafts=3, step=0, vocabulary=127),
    Case("one past a block", slots=2, drafts=3, step=2, vocabulary=129),
    Case("135M", slots=1, drafts=4, step=3, vocabulary=49152),
    Case("EAGLE-3 draft vocabulary", slots=4, drafts=3, step=2, vocabulary=32000),
)
