"""The choice of experts in one Triton kernel, where XLA takes several."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.choose_experts.reference import Softmax
from jaxspec_kernels.choose_experts.reference import choose_experts as reference

_MOST_EXPERTS = 1024
"""A program, which is one warp, has the scores of a row in registers."""
_LOWEST = tl.constexpr(-(1 << 62))


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames=("keep", "softmax"))
def choose_experts(
    scores: jax.Array, *, keep: int, softmax: Softmax | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.choose_experts`, which is called for more than 1,024 experts."""
    rows, count = scores.shape
    if not rows or count > _MOST_EXPERTS:
        return reference(scores, keep=keep, softmax=softmax)
    weights, chosen = triton_call(
        choose_kernel,
        (scores,),
        [jax.ShapeDtypeStruct((rows, keep), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(rows,),
        num_warps=1,
        count=count,
        keep=keep,
        softmax=softmax or "",
        block=triton.next_power_of_2(count),
        kept=triton.next_power_of_2(keep),
    )
    return weights, chosen


@triton.jit
def choose_kernel(
    scores,
    weights,
    chosen,
    count: tl.constexpr,
    keep: tl.constexpr,
    softmax: tl.constexpr,
    block: tl.constexpr,
    kept: tl.constexpr,
):
    """A number is ordered by the score and, below it, by the index, so that the largest is one reduction."""
    row = tl.program_id(0)
    index = tl.arange(0, block)
    score = tl.load(scores + row * count + index, mask=index < count, other=float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    number = tl.where(index < count, ordered * block - index, _LOWEST)
    place = tl.arange(0, kept)
    best = tl.zeros((kept,), tl.float32)
    experts = tl.zeros((kept,), tl.int32)
    first = 0.0
    total = 0.0
    for i in tl.static_range(keep):
        largest = tl.max(number, 0)
        number = tl.where(number == largest, _LOWEST, number)
        expert = ((-largest) & (block - 1)).to(tl.int32)
        bits = ((largest + expert) // block).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if softmax != "":
            if i == 0:
                first = value
                if softmax == "all":
                    total = tl.sum(tl.exp(score - first), 0)
            value = tl.exp(value - first)
            if softmax == "chosen":
                total += value
        best = tl.where(place == i, value, best)
        experts = tl.where(place == i, expert, experts)
    if softmax != "":
        best /= total
    tl.store(weights + row * keep + place, best, mask=place < keep)
    tl.store(chosen + row * keep + place, experts, mask=place < keep)
