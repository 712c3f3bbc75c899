"""Rows grouped by expert: every row is in one tile, and the grid has room for every tile."""

from functools import partial

import jax
import numpy as np
import pytest
from jaxspec_kernels.expert_matmul.row_groups import group_rows, max_tiles

OP = group_rows


def test_rows_of_an_expert_lie_side_by_side_in_their_order(implementation):
    experts = np.array([3, 0, 3, 1, 0, 3], np.int32)
    group = jax.jit(partial(group_rows, implementation=implementation), static_argnums=1)
    order, starts = group(experts, 5)
    np.testing.assert_array_equal(order, [1, 4, 3, 0, 2, 5])
    np.testing.assert_array_equal(starts, [0, 2, 3, 3, 6, 6])
    assert order.dtype == starts.dtype == np.int32
    for rows, count in ((1, 1), (65, 32), (512, 32), (513, 31), (1000, 256), (8192, 128)):
        experts = np.random.default_rng(rows).integers(0, count, rows).astype(np.int32)
        order, starts = group(experts, count)
        np.testing.assert_array_equal(order, np.argsort(experts, stable=True))
        np.testing.assert_array_equal(starts, np.searchsorted(np.sort(experts), np.arange(count + 1)))


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize(("rows", "count"), [(1, 4), (7, 3), (40, 8), (40, 1), (5, 64)])
def test_the_grid_has_room_for_the_worst_choice_and_no_more(rows, count, block):
    def tiles(counts):
        return int(np.ceil(np.asarray(counts) / block).sum())

    rng = np.random.default_rng(0)
    for _ in range(50):
        assert tiles(np.bincount(rng.integers(0, count, rows))) <= max_tiles(rows, count, block)
    # One row each, and the rest to one of them.
    chosen = min(rows, count)
    worst = max(
        tiles([1 + (rows - chosen) - spare, *([1] * (chosen - 1)), spare])
        for spare in range(rows - chosen + 1)
    )
    assert max_tiles(rows, count, block) <= worst + 1
