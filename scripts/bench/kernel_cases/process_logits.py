"""Sizes for the benchmark of `process_logits`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call. The first `truncated` slots (None: all) ask for `top_k` and `top_p`; the rest are greedy."""

    name: str
    slots: int
    rows: int
    vocabulary: int
    top_k: int = 0
    top_p: float = 1.0
    truncated: int | None = None


CASES = (
    Case("8B, 64 greedy chunks", slots=64, rows=1, vocabulary=128256),
    Case("8B, one of 64 slots", slots=64, rows=1, vocabulary=128256, top_k=40, top_p=0.9, truncated=1),
    Case("8B, 64 slots", slots=64, rows=1, vocabulary=128256, top_k=40, top_p=0.9),
    Case("8B, one slot", slots=1, rows=4, vocabulary=128256, top_k=40, top_p=0.9),
    Case("135M, one slot", slots=1, rows=3, vocabulary=49152, top_p=0.9),
)
