"""Slots and visible ranges in one Triton kernel, which runs only if it is named, as XLA is faster."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call

_BLOCK = 128


def place_rows(
    positions: jax.Array,
    valid: jax.Array,
    page_table: jax.Array,
    *,
    page_size: int,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.place_rows`. One program places up to 128 rows."""
    if positions.size == 0:
        return positions, positions, positions
    slots, first, last = triton_call(
        _place_rows_kernel,
        (positions, valid, page_table),
        [jax.ShapeDtypeStruct(positions.shape, jnp.int32)] * 3,
        grid=(triton.cdiv(positions.size, _BLOCK),),
        num_warps=1,
        count=positions.size,
        rows=positions.shape[1],
        width=page_table.shape[1],
        page_size=page_size,
        window=window or 0,
        block=_BLOCK,
    )
    return slots, first, last


@triton.jit
def _place_rows_kernel(
    positions,
    valid,
    page_table,
    slots,
    first,
    last,
    count: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * block + tl.arange(0, block)
    mask = row < count
    position = tl.load(positions + row, mask=mask, other=0)
    owned = tl.load(valid + row, mask=mask, other=0) & (position >= 0) & (position < width * page_size)
    page = tl.load(page_table + row // rows * width + position // page_size, mask=mask & owned, other=0)
    # Triton's remainder has the dividend's sign.
    offset = (position % page_size + page_size) % page_size
    tl.store(slots + row, page * page_size + offset, mask=mask)
    start = tl.maximum(position - (window - 1), 0) if window else tl.zeros_like(position)
    tl.store(first + row, start, mask=mask)
    tl.store(last + row, tl.where(page > 0, position, -1), mask=mask)
