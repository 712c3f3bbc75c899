from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.penalise import penalise
from jaxspec_kernels.token_marks import IN_PROMPT

OP = penalise


@pytest.mark.parametrize(("slots", "rows", "drafts", "size"), [(1, 1, 0, 1), (3, 5, 4, 7), (8, 2, 3, 100)])
def test_tokens_of_the_text_and_of_the_drafts_before_a_row(slots, rows, drafts, size, implementation):
    rng = np.random.default_rng(slots)
    logits = rng.normal(size=(slots, rows, size)).astype(np.float32)
    logits[0, 0, 0] = -np.inf
    counts = rng.integers(3, size=(slots, size)) * (rng.random((slots, size)) < 0.5)
    in_prompt = rng.random((slots, size)) < 0.3
    columns = rng.integers(-2, size + 2, size=(slots, drafts))
    columns[:, 1:2] = columns[:, :1]  # twice
    seen = np.minimum(np.arange(rows), drafts)
    repetition, frequency, presence = rng.uniform(0.5, 2, size=(3, slots)).astype(np.float32)
    expected = logits.astype(np.float64)
    for slot, row, token in np.ndindex(logits.shape):
        count = counts[slot, token] + (columns[slot, : seen[row]] == token).sum()
        x = expected[slot, row, token]
        if count or in_prompt[slot, token]:
            x = x / repetition[slot] if x > 0 else x * repetition[slot]
        if count:
            x -= frequency[slot] * count + presence[slot]
        expected[slot, row, token] = x
    integers = (counts + IN_PROMPT * in_prompt, columns, seen)
    arguments = (logits, *(jnp.asarray(x, jnp.int32) for x in integers), repetition, frequency, presence)
    found = jax.jit(partial(OP, implementation=implementation))(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    same = (counts == 0) & ~in_prompt
    np.testing.assert_array_equal(np.asarray(found)[:, 0][same], logits[:, 0][same])
