from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.token_marks import IN_PROMPT, token_marks

OP = token_marks


@pytest.mark.parametrize(("slots", "width", "size"), [(1, 1, 1), (3, 40, 7), (8, 257, 100), (2, 0, 5)])
def test_tokens_of_the_output_are_counted_and_those_of_the_prompt_marked(slots, width, size, implementation):
    rng = np.random.default_rng(slots)
    columns = rng.integers(-3, size + 3, size=(slots, width))  # some have no column here
    length = rng.integers(width + 1, size=slots)
    prompt_length = rng.integers(width + 2, size=slots)  # of a text that is still read, beyond its end
    expected = np.zeros((slots, size), np.int64)
    for slot in range(slots):
        for place, column in enumerate(columns[slot, : length[slot]]):
            if 0 <= column < size and place < prompt_length[slot]:
                expected[slot, column] = IN_PROMPT
            elif 0 <= column < size:
                expected[slot, column] += 1
    arguments = (jnp.asarray(x, jnp.int32) for x in (columns, prompt_length, length))
    found = jax.jit(partial(OP, size=size, implementation=implementation))(*arguments)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)
