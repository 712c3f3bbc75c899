from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.penalise import penalise
from jaxspec_kernels.token_marks import IN_PROMPT
from op_base import OpTest


@dataclass(frozen=True)
class Case:
    name: str
    slots: int
    rows: int
    drafts: int
    width: int


class TestPenalise(OpTest):
    """A row is penalised for the tokens of the text and of the drafts before it."""

    op = penalise
    cases = (
        Case("one logit", 1, 1, 0, 1),
        Case("a row for each draft", 3, 5, 4, 7),
        Case("fewer rows than drafts", 8, 2, 3, 100),
        Case("few tokens of many", 2, 3, 4, 1000),
    )
    usual = ("a row for each draft", "fewer rows than drafts")
    bound = 1e-6
    by_row = (0, 1, 2, 4, 5, 6)
    exact = ("xla", "numba")

    def arguments(self, case):
        rng, shape = np.random.default_rng(case.slots), (case.slots, case.width)
        logits = rng.normal(size=(case.slots, case.rows, case.width))
        logits[0, 0, 0] = -np.inf
        counts = rng.integers(3, size=shape) * (rng.random(shape) < 0.5)
        marks = counts + IN_PROMPT * (rng.random(shape) < 0.3)
        if case.width > 100:  # at the edges of blocks of 64, one in each
            marks[:, ~np.isin(np.arange(case.width) % 128, (63, 64))] = 0
        drafts = rng.integers(-2, case.width + 2, size=(case.slots, case.drafts))
        drafts[:, 1:2] = drafts[:, :1]  # twice
        seen = np.minimum(np.arange(case.rows), case.drafts)
        penalties = rng.uniform(0.5, 2, size=(3, case.slots))
        integers = (jnp.asarray(x, jnp.int32) for x in (marks, drafts, seen))
        return jnp.asarray(logits, jnp.float32), *integers, *jnp.asarray(penalties, jnp.float32)

    def definition(self, case, logits, marks, drafts, seen, repetition, frequency, presence):
        expected = logits.astype(np.float64)
        for slot, row, token in np.ndindex(logits.shape):
            count = marks[slot, token] % IN_PROMPT + (drafts[slot, : seen[row]] == token).sum()
            x = expected[slot, row, token]
            if count or marks[slot, token]:
                x = x / repetition[slot] if x > 0 else x * repetition[slot]
            if count:
                x -= frequency[slot] * count + presence[slot]
            expected[slot, row, token] = x
        return expected

    def test_other_tokens_keep_their_bits(self, usual_case, implementation):
        logits, marks, *others = self.arguments(usual_case)
        (found,) = self.run(usual_case, (logits, marks, *others), implementation)
        same = np.asarray(marks) == 0
        np.testing.assert_array_equal(np.asarray(found)[:, 0][same], np.asarray(logits)[:, 0][same])
