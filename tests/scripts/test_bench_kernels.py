"""What `bench_kernels.py` compares before it times a kernel."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_calls import all_calls


@cache
def calls():
    """By the names of operations and of cases: listing them takes seconds."""
    return {(each.op.name, each.name): each for each in all_calls()}


@pytest.mark.parametrize("case", ["odd sizes", "Mamba-2, odd sizes"])
def test_outputs_of_padded_rows_are_not_compared(case):
    call = calls()["recurrence_scan", case]
    given = call.arguments(0)
    *states, outputs = jax.jit(partial(call.op, **call.static, implementation="xla"))(*given)
    counts = np.arange(outputs.shape[1]) < np.asarray(given[3])[:, None]
    assert not counts.all()

    def compared(where):
        change = jnp.where(where[..., None, None, None], 1.0, 0.0)
        return jax.tree.map(np.asarray, call.compared((*states, outputs + change)))

    plain = compared(np.zeros_like(counts))
    for one, other in zip(plain, compared(~counts), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (compared(counts)[-1] != plain[-1]).any()
