import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.slot_mapping import CASES
from jaxspec_kernels.slot_mapping import place_rows, slot_mapping
from op_base import OpTest


class PlacesTest(OpTest):
    """Every row gets the slot of its page, or one of page 0, and then it sees nothing."""

    cases = CASES
    usual = ("crosses two pages", "runs past the table")
    by_row = (0, 1, 2)
    exact = ("xla", "numba", "triton")

    def arguments(self, case):
        rng = np.random.default_rng(0)
        page_table = 1 + rng.permutation(case.slots * case.table_width).reshape(case.slots, case.table_width)
        page_table[-1, -1] = 0
        positions = np.tile(case.start + np.arange(case.rows), (case.slots, 1))
        valid = rng.random(positions.shape) < 0.8
        return jnp.asarray(positions, jnp.int32), jnp.asarray(valid), jnp.asarray(page_table, jnp.int32)

    def places(self, case, positions, valid, page_table):
        """The slots, and the first and the last position that rows see: i32[B, Q] each."""
        slots, first, last = (np.empty(positions.shape, np.int32) for _ in range(3))
        for (b, q), position in np.ndenumerate(positions):
            page, offset = divmod(int(position), case.page_size)
            owned = valid[b, q] and 0 <= page < case.table_width and page_table[b, page]
            slots[b, q] = page_table[b, page] * case.page_size + offset if owned else offset
            last[b, q] = position if owned else -1
            first[b, q] = max(0, position - case.window + 1 if case.window else 0)
        return slots, first, last


class TestPlaceRows(PlacesTest):
    op = place_rows

    def options(self, case):
        return {"page_size": case.page_size, "window": case.window}

    def definition(self, case, *given):
        return self.places(case, *given)


class TestSlotMapping(PlacesTest):
    op = slot_mapping

    def options(self, case):
        return {"page_size": case.page_size}

    def definition(self, case, *given):
        return self.places(case, *given)[0]
