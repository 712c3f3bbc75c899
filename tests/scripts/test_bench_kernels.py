"""What `bench_kernels.py` compares before it times a kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_calls import all_calls

SCANS = [each for each in all_calls() if each.op.name.endswith("_scan") and each.name == "odd sizes"]


@pytest.mark.parametrize("call", SCANS, ids=lambda call: call.op.name)
def test_outputs_of_padded_rows_are_not_compared(call):
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
