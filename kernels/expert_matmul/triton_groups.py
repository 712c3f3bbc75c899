"""Grouping rows by expert in a Triton kernel, which counts instead of sorting."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call

_BLOCK = 32
_CHUNK = 256


def group_rows(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """See `row_groups.group_rows`.

    A row's place is the number of rows that come before it. One program counts them for `_BLOCK` rows, and a
    last one finds the starts of all groups. 512 rows take one launch instead of XLA's five.
    """
    rows = experts.shape[0]
    padded = triton.next_power_of_2(count + 1)
    order, starts = triton_call(
        _group_kernel,
        (experts,),
        [jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((count + 1,), jnp.int32)],
        grid=(triton.cdiv(rows, _BLOCK) + 1,),
        rows=rows,
        count=count,
        padded=padded,
        block=_BLOCK,
        chunk=_CHUNK,
        chunk_of_starts=max(16, _BLOCK * _CHUNK // padded),
    )
    return order, starts


@triton.jit
def _group_kernel(
    experts,
    order,
    starts,
    rows: tl.constexpr,
    count: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    chunk_of_starts: tl.constexpr,
):
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:
        group = tl.arange(0, padded)
        start = tl.zeros([padded], tl.int32)
        for first in range(0, rows, chunk_of_starts):
            index = first + tl.arange(0, chunk_of_starts)
            expert = tl.load(experts + index, mask=index < rows, other=count)
            start += tl.sum((expert[None, :] < group[:, None]).to(tl.int32), 1)
        tl.store(starts + group, start, mask=group <= count)
    else:
        row = program * block + tl.arange(0, block)
        chosen = tl.load(experts + row, mask=row < rows, other=count)
        place = tl.zeros([block], tl.int32)
        for first in range(0, rows, chunk):
            index = first + tl.arange(0, chunk)
            expert = tl.load(experts + index, mask=index < rows, other=count)
            is_before = (expert[None, :] == chosen[:, None]) & (index[None, :] < row[:, None])
            is_before |= expert[None, :] < chosen[:, None]
            place += tl.sum(is_before.to(tl.int32), 1)
        tl.store(order + place, row, mask=row < rows)
