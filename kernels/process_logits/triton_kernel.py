"""Temperature, min-p, top-k and top-p in Triton: a row searches for a threshold only if it asks for one."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.process_logits.reference import process_logits as reference

_BLOCK = 4096
_WARPS = 16


def process_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    truncated: bool,
) -> jax.Array:
    """See `reference.process_logits`, which XLA fuses with what follows where nothing is searched."""
    if not truncated or not logits.size:
        return reference(logits, temperature, top_k, top_p, min_p, truncated=truncated)
    slots, rows, vocabulary = logits.shape
    (processed,) = triton_call(
        _kernel,
        (logits, temperature, top_k, top_p, jnp.log(min_p)),
        [jax.ShapeDtypeStruct(logits.shape, jnp.float32)],
        grid=(slots * rows,),
        num_warps=_WARPS,
        num_rows=rows,
        vocabulary=vocabulary,
        block=min(max(triton.next_power_of_2(vocabulary), 16), _BLOCK),
    )
    return processed


@triton.jit
def _load(row, start, vocabulary: tl.constexpr, block: tl.constexpr):
    index = start + tl.arange(0, block)
    return tl.load(row + index, mask=index < vocabulary, other=float("-inf"))


@triton.jit
def _threshold(
    row, wanted, least, peak, vocabulary: tl.constexpr, block: tl.constexpr, is_mass: tl.constexpr
):
    """A threshold: the elements at or above it are the fewest that weigh `wanted` or more.

    It lies in an interval that is cut into four until a single element or a single float is left.

    Args:
      row: f32[vocabulary].
      least, peak: the row's least finite element, and its largest.
      is_mass: whether an element x weighs exp(x - peak), instead of 1.
    """
    # Elements at or above `low` weigh enough, those at or above `high` do not.
    low, high = least, peak + tl.abs(peak) * 2.4e-7 + 1e-37
    num_low, num_high = vocabulary, 0
    middle = low + (high - low) * 0.5
    is_open = low < high
    while is_open:
        # Rounding may make a quarter of a few subnormals zero; the middle lies between the ends in any case.
        first, second, third = low + (middle - low) * 0.5, middle, middle + (high - middle) * 0.5
        sums_1 = tl.zeros((block,), tl.float32)
        sums_2 = tl.zeros((block,), tl.float32)
        sums_3 = tl.zeros((block,), tl.float32)
        nums_1 = tl.zeros((block,), tl.int32)
        nums_2 = tl.zeros((block,), tl.int32)
        nums_3 = tl.zeros((block,), tl.int32)
        following = _load(row, 0, vocabulary, block)
        for start in range(0, vocabulary, block):
            x = following
            # Loaded one block ahead, so that the sums need not wait for memory.
            following = _load(row, start + block, vocabulary, block)
            nums_1 += (x >= first).to(tl.int32)
            nums_2 += (x >= second).to(tl.int32)
            nums_3 += (x >= third).to(tl.int32)
            if is_mass:
                weight = tl.exp(x - peak)
                sums_1 += tl.where(x >= first, weight, 0.0)
                sums_2 += tl.where(x >= second, weight, 0.0)
                sums_3 += tl.where(x >= third, weight, 0.0)
        num_1, num_2, num_3 = tl.sum(nums_1, 0), tl.sum(nums_2, 0), tl.sum(nums_3, 0)
        if is_mass:
            sum_1, sum_2, sum_3 = tl.sum(sums_1, 0), tl.sum(sums_2, 0), tl.sum(sums_3, 0)
        else:
            sum_1, sum_2, sum_3 = num_1.to(tl.float32), num_2.to(tl.float32), num_3.to(tl.float32)
        if sum_3 >= wanted:
            low, num_low = third, num_3
        elif sum_2 >= wanted:
            low, num_low, high, num_high = second, num_2, third, num_3
        elif sum_1 >= wanted:
            low, num_low, high, num_high = first, num_1, second, num_2
        else:
            high, num_high = first, num_1
        middle = low + (high - low) * 0.5
        is_open = (num_low - num_high > 1) & (middle > low) & (middle < high)
    return low


@triton.jit
def _kernel(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    processed,
    num_rows: tl.constexpr,
    vocabulary: tl.constexpr,
    block: tl.constexpr,
):
    slot = tl.program_id(0) // num_rows
    # 64 bits: logits of many rows may be more than 2^31 numbers.
    begin = tl.program_id(0).to(tl.int64) * vocabulary
    row = processed + begin
    asked = tl.load(temperature + slot)
    is_sampled = asked > 0
    divisor = tl.where(is_sampled, asked, 1.0)
    peaks = tl.full((block,), float("-inf"), tl.float32)
    leasts = tl.full((block,), float("inf"), tl.float32)
    for start in range(0, vocabulary, block):
        index = start + tl.arange(0, block)
        x = _load(logits + begin, start, vocabulary, block).to(tl.float32)
        x = tl.div_rn(x, tl.broadcast_to(divisor, (block,)))
        peaks = tl.maximum(peaks, x)
        leasts = tl.minimum(leasts, tl.where(x == float("-inf"), float("inf"), x))
        tl.store(row + index, x, mask=index < vocabulary)
    if is_sampled:
        # The row is read again by other threads than those that wrote it.
        tl.debug_barrier()
        peak, least = tl.max(peaks, 0), tl.min(leasts, 0)
        floor = peak + tl.load(log_min_p + slot)
        k = tl.load(top_k + slot)
        p = tl.load(top_p + slot)
        if (k > 0) & (k < vocabulary):
            kth = _threshold(row, k.to(tl.float32), least, peak, vocabulary, block, is_mass=False)
            floor = tl.maximum(floor, kth)
        if p < 1:
            sums = tl.zeros((block,), tl.float32)
            for start in range(0, vocabulary, block):
                x = _load(row, start, vocabulary, block)
                sums += tl.where(x >= floor, tl.exp(x - peak), 0.0)
            # At least the smallest normal float, so that no mass at all is never enough.
            mass = tl.maximum(p * tl.sum(sums, 0), 1.1754943508222875e-38)
            floor = tl.maximum(floor, _threshold(row, mass, least, peak, vocabulary, block, is_mass=True))
        if floor > float("-inf"):
            tl.debug_barrier()
            for start in range(0, vocabulary, block):
                index = start + tl.arange(0, block)
                x = _load(row, start, vocabulary, block)
                tl.store(row + index, tl.where(x < floor, float("-inf"), x), mask=index < vocabulary)
