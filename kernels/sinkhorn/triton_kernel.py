"""The Sinkhorn-Knopp algorithm in one Triton kernel; XLA starts six for every iteration."""

from functools import partial

import jax
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.sinkhorn.reference import sinkhorn as reference

_NUMBERS = 128
"""Numbers of a program, which is one warp: four for each thread."""
_LARGEST = 16
"""A matrix of this size has twice as many, and is a program of its own."""


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames=("iterations", "eps"))
def sinkhorn(scores: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """See `reference.sinkhorn`, which is called for sizes that are no powers of two, and large ones."""
    rows, size, _ = scores.shape
    if not rows or size > _LARGEST or size != triton.next_power_of_2(size):
        return reference(scores, iterations=iterations, eps=eps)
    block = max(_NUMBERS // size**2, 1)
    (mix,) = triton_call(
        sinkhorn_kernel,
        (scores, rows),
        [jax.ShapeDtypeStruct(scores.shape, scores.dtype)],
        grid=(triton.cdiv(rows, block),),
        num_warps=1,
        size=size,
        iterations=iterations,
        eps=eps,
        block=block,
    )
    return mix


@triton.jit
def sinkhorn_kernel(
    scores,
    rows,
    mix,
    size: tl.constexpr,
    iterations: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * block + tl.arange(0, block)[:, None, None]
    at = row * (size * size) + tl.arange(0, size)[None, :, None] * size + tl.arange(0, size)[None, None, :]
    numbers = tl.load(scores + at, mask=row < rows, other=0.0)
    numbers = tl.exp(numbers - tl.max(numbers, 2, keep_dims=True))
    numbers = numbers / tl.sum(numbers, 2, keep_dims=True) + eps
    numbers = numbers / (tl.sum(numbers, 1, keep_dims=True) + eps)
    for _ in range(1, iterations):
        numbers = numbers / (tl.sum(numbers, 2, keep_dims=True) + eps)
        numbers = numbers / (tl.sum(numbers, 1, keep_dims=True) + eps)
    tl.store(mix + at, numbers, mask=row < rows)
