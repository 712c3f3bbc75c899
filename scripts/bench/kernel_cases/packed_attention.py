"""Sizes for `packed_attention` and its gradients: small ones for tests, large ones for the benchmark."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One call over sequences of `length` rows.

    Texts of `text` rows follow one another, and begin in a different place in every sequence. Rows see all
    rows of their text before them, or the last `window` positions when they are `ahead` positions further,
    as in a draft step.
    """

    name: str
    sequences: int
    length: int
    text: int
    kv_heads: int
    group: int
    head_dim: int
    window: int | None = None
    ahead: int = 0
    dtype: str = "float32"

    def first(self) -> np.ndarray:
        """i32[sequences, length]: the first row that each row sees."""
        row = np.arange(self.length)
        # The first text of a sequence is cut off at its front.
        shift = np.arange(self.sequences)[:, None] * 7 % self.text
        position = (row + shift) % self.text
        start = np.maximum(row - position, 0)
        if self.window is None:
            return start.astype(np.int32)
        return np.maximum(start, row + self.ahead - (self.window - 1)).astype(np.int32)


SMALL = (
    Case("one", 1, 1, 1, 1, 1, 1),
    Case("texts of one row", 2, 5, 1, 2, 1, 16),
    Case("one text", 2, 150, 150, 2, 3, 24),
    Case("odd sizes", 3, 131, 37, 2, 3, 40),
    Case("window", 2, 200, 90, 1, 4, 32, window=20),
    Case("window, draft step", 2, 200, 90, 1, 2, 32, window=20, ahead=3),
    Case("window shorter than the draft", 1, 70, 30, 1, 2, 16, window=2, ahead=3),
    Case("wide heads", 1, 200, 130, 1, 2, 192, dtype="bfloat16"),
)
LARGE = (
    Case("Gemma 3, window", 1, 1024, 700, 1, 4, 256, window=512, dtype="bfloat16"),
    Case("SmolLM2-135M, short texts", 12, 2048, 360, 3, 3, 64, dtype="bfloat16"),
    Case("SmolLM2-135M, long texts", 12, 2048, 2048, 3, 3, 64, dtype="bfloat16"),
    Case("Llama-3-8B", 4, 2048, 700, 8, 4, 128, dtype="bfloat16"),
)
