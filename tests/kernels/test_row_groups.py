"""Rows grouped by expert: every row is in one tile, and the grid has room for every tile."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.expert_matmul.row_groups import group_rows, max_tiles
from op_base import OpTest


class Case(NamedTuple):
    name: str
    rows: int
    count: int


class TestGroupRows(OpTest):
    """Rows of an expert lie side by side in their order."""

    op = group_rows
    cases = tuple(
        Case(f"{rows} rows of {count}", rows, count)
        for rows, count in ((6, 5), (1, 1), (65, 32), (512, 32), (513, 31), (1000, 256), (8192, 128))
    )
    usual = ("6 rows of 5",)
    by_row = ()  # where a row lies depends on all

    def arguments(self, case):
        rng = np.random.default_rng(case.rows)
        return (jnp.asarray(rng.integers(0, case.count, case.rows), jnp.int32),)

    def options(self, case):
        return {"count": case.count}

    def definition(self, case, experts):
        order = np.argsort(experts, stable=True)
        starts = np.searchsorted(np.sort(experts), np.arange(case.count + 1))
        return order.astype(np.int32), starts.astype(np.int32)


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
