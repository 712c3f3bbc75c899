"""Sizes for the tests and the benchmark of `choose_experts`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`keep` of `experts` experts for each of `rows` rows; with `ties`, many scores are equal."""

    name: str
    rows: int
    experts: int
    keep: int
    softmax: str | None = None
    ties: bool = False


CASES = (
    Case("one row", 1, 8, 2, "chosen"),
    Case("odd sizes", 7, 10, 3, "chosen"),
    Case("odd sizes, over all", 7, 10, 3, "all"),
    Case("ties", 9, 40, 6, ties=True),
    Case("all experts", 5, 6, 6),
    Case("gpt-oss-20b, four rows", 4, 32, 4, "chosen"),
    Case("Qwen3-30B, four rows", 4, 128, 8, "chosen"),
    Case("Qwen3-30B, 128 rows", 128, 128, 8, "chosen"),
    Case("DeepSeek-V3, four rows", 4, 256, 8),
    Case("Qwen3-Next, a prompt", 2048, 512, 10, "chosen"),
)
