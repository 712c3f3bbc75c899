"""Slots and visible ranges as one loop on a CPU, where XLA makes a dozen operations of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.calls import numba_call as call

_NAME = "jaxspec_place_rows"


def place_rows(
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    *,
    page_size: int,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.place_rows`."""
    placed = [jax.ShapeDtypeStruct(positions.shape, jnp.int32)] * 3
    sizes = np.array([page_size, window or 0], np.int32)
    slots, first, last = jax.ffi.ffi_call(_target(), placed)(positions, valid, page_table, sizes)
    return slots, first, last


def slot_mapping(
    positions: jax.Array, valid: jax.Array, page_table: jax.Array, *, page_size: int
) -> jax.Array:
    """See `reference.slot_mapping`."""
    return place_rows(positions, valid, page_table, page_size=page_size)[0]


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set(), alone=True)


def _part(frame, part, parts):
    positions_, table_ = call.argument(frame, 0), call.argument(frame, 2)
    groups, rows = call.shape(positions_, 2)
    width = call.shape(table_, 2)[1]
    positions, valid = call.integers(positions_), call.bytes_of(call.argument(frame, 1))
    table, sizes = call.integers(table_), call.integers(call.argument(frame, 3))
    page_size, window = sizes[0], sizes[1]
    slots = call.integers(call.result(frame, 0))
    first, last = call.integers(call.result(frame, 1)), call.integers(call.result(frame, 2))
    for row in range(groups * rows):
        position = positions[row]
        page = 0
        if valid[row] and 0 <= position < width * page_size:
            page = table[row // rows * width + position // page_size]
        slots[row] = page * page_size + position % page_size
        first[row] = max(position - window + 1, 0) if window else 0
        last[row] = position if page else -1
    return 0
