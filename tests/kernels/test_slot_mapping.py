from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.slot_mapping import CASES
from jaxspec_kernels.slot_mapping import place_rows, slot_mapping

OP = place_rows


def arguments(case):
    rng = np.random.default_rng(0)
    page_table = 1 + rng.permutation(case.slots * case.table_width).reshape(case.slots, case.table_width)
    page_table[-1, -1] = 0
    positions = np.tile(case.start + np.arange(case.rows), (case.slots, 1))
    valid = rng.random(positions.shape) < 0.8
    return jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.asarray(page_table, jnp.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_gets_the_slot_of_its_page_or_one_of_page_0_and_sees_as_much(case, implementation):
    positions, valid, page_table = arguments(case)
    options = {"page_size": case.page_size, "window": case.window, "implementation": implementation}
    placed = jax.jit(partial(OP, **options))(positions, valid, page_table)
    assert all((x.shape, x.dtype) == (positions.shape, jnp.int32) for x in placed)
    slots, first, last = map(np.asarray, placed)
    valid, page_table = np.asarray(valid), np.asarray(page_table)
    for (b, q), position in np.ndenumerate(positions):
        page, offset = divmod(int(position), case.page_size)
        if valid[b, q] and 0 <= page < case.table_width and page_table[b, page]:
            assert slots[b, q] == page_table[b, page] * case.page_size + offset
            assert last[b, q] == position
            assert first[b, q] == max(0, position - case.window + 1 if case.window else 0)
        else:
            assert 0 <= slots[b, q] < case.page_size
            assert last[b, q] == -1
            assert first[b, q] >= 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_implementations_agree_on_every_row(case, implementation):
    options = {"page_size": case.page_size, "window": case.window}
    for mine, reference in zip(
        jax.jit(partial(OP, **options, implementation=implementation))(*arguments(case)),
        jax.jit(partial(OP, **options, implementation="xla"))(*arguments(case)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, reference)


def test_slots_alone_are_the_same():
    case = CASES[4]
    slots, _, _ = place_rows(*arguments(case), page_size=case.page_size)
    np.testing.assert_array_equal(slot_mapping(*arguments(case), page_size=case.page_size), slots)
