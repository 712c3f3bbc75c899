import os
import subprocess
import sys

import numpy as np
import pytest
from bench.kernel_cases.paged_attention import CASES
from jaxspec_kernels.paged_attention import paged_attention
from paged_attention_arguments import arguments, attention_in_float64

pytestmark = pytest.mark.skipif(
    paged_attention.why_not("numba") is not None,
    reason=f"paged_attention's Numba kernel {paged_attention.why_not('numba')}",
)


def test_rows_may_begin_in_different_tiles():
    case = next(case for case in CASES if case.name == "full table")
    queries, cache, table, first, last = arguments(case)
    # The slot with the longest context, often. A thread computes one after another in the same memory.
    # Only the rows of every second one begin at its first position, and the next one finds their weights.
    slot = np.full(32, case.slots - 1)
    stagger = np.arange(32)[:, None] % 2 * 3 * case.page_size * np.arange(case.rows, dtype=np.int32)
    given = queries[slot], cache, table[slot], first[slot] + stagger, last[slot]
    result = np.asarray(paged_attention(*given, scale=0.1, implementation="numba"))
    np.testing.assert_allclose(result, attention_in_float64(*given, scale=0.1), rtol=1e-4, atol=1e-5)


FIRST_AND_LATER = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from jaxspec_kernels.paged_attention.numba_kernel import paged_attention
draw = np.random.default_rng(0).normal
queries, cache = jnp.float32(draw(size=(1, 1, 4, 64))), jnp.float32(draw(size=(6, 1, 2, 16, 64)))
attend = jax.jit(lambda *rows: paged_attention(queries, cache, jnp.arange(1, 6)[None], *rows, scale=0.125))
row = jnp.zeros((1, 1), jnp.int32)
outputs = [np.asarray(attend(row, row + last)).tobytes() for last in (5, 38, 70)]
print(hashlib.sha256(b"".join(outputs)).hexdigest())
"""


def test_a_kernel_out_of_the_cache_sums_as_one_that_was_just_compiled(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FIRST_AND_LATER]
    first = subprocess.check_output(command, env=environment, text=True)
    assert any(tmp_path.rglob("*.nbc"))
    assert subprocess.check_output(command, env=environment, text=True) == first
