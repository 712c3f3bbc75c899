import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.slot_mapping import slot_mapping
from jaxspec_kernels.slot_mapping.cases import CASES

OP = slot_mapping


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_gets_the_slot_of_its_page_or_one_of_page_0(case, implementation):
    rng = np.random.default_rng(0)
    page_table = 1 + rng.permutation(case.slots * case.table_width).reshape(case.slots, case.table_width)
    page_table[-1, -1] = 0
    positions = np.tile(case.start + np.arange(case.rows), (case.slots, 1))
    valid = rng.random(positions.shape) < 0.8
    slots = OP(
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(valid),
        jnp.asarray(page_table, jnp.int32),
        page_size=case.page_size,
        implementation=implementation,
    )
    assert slots.shape == positions.shape
    assert slots.dtype == jnp.int32
    for (b, q), slot in np.ndenumerate(slots):
        page, offset = divmod(positions[b, q], case.page_size)
        if valid[b, q] and 0 <= page < case.table_width and page_table[b, page]:
            assert slot == page_table[b, page] * case.page_size + offset
        else:
            assert 0 <= slot < case.page_size
