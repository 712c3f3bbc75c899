"""A gated network in FP8 (`engine.gpu_activations`): one kernel between its two products."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.fp8_matmul.gated_reference import gated_fp8_matmul as reference
from jaxspec_kernels.fp8_matmul.reference import BLOCK, LARGEST, SMALLEST
from jaxspec_kernels.fp8_matmul.triton_kernel import (
    checked_factor,
    larger,
    largest_to_code,
    multiply_by_outputs,
    multiply_codes,
    output_scales,
    split_rows,
)
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight

_FEW_BLOCKS = 128
"""Up to so many blocks of a row fit in the registers of eight warps."""


# All layers share one trace and one lowering.
@jax.jit
def gated_fp8_matmul(x: jax.Array, gate_up: CodedWeight, down: CodedWeight) -> jax.Array:
    """See `gated_reference.gated_fp8_matmul`, which computes other dtypes."""
    if x.dtype != jnp.bfloat16 or not x.size:
        return reference(x, gate_up, down)
    values, factors = split_rows(x.reshape(-1, gate_up.width), 1)
    sums = multiply_codes(values, gate_up, jnp.dtype(jnp.bfloat16))
    values, factors = gate_rows(sums, factors, output_scales(gate_up))
    return multiply_by_outputs(values, factors, down, x.dtype).reshape(*x.shape[:-1], *down.out_axes)


def gate_rows(sums: jax.Array, factors: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """SiLU of gates times ups, as `split_rows` gives them with one term.

    Args:
      sums: bf16[rows, 2 * F], gates first, without the factors of their rows and outputs.
      factors: f32[rows].
      scale: f32[2 * F].
    """
    rows, width = sums.shape[0], sums.shape[1] // 2
    blocks = triton.next_power_of_2(width // BLOCK)
    values, factors = triton_call(
        gate_kernel,
        (sums, factors, scale),
        [jax.ShapeDtypeStruct((1, rows, width), jnp.uint8), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(rows,),
        num_warps=8 if blocks <= _FEW_BLOCKS else 16,
        width=width,
        half=BLOCK // 2,
        largest_code=LARGEST,
        smallest=SMALLEST,
        blocks=blocks,
    )
    return values, factors


@triton.jit
def gate_kernel(
    sums,
    factors,
    scale,
    values,
    own_factors,
    width: tl.constexpr,
    half: tl.constexpr,
    largest_code: tl.constexpr,
    smallest: tl.constexpr,
    blocks: tl.constexpr,
):
    """Gates a row and rounds it; the two halves of a block are interleaved, as in `split_kernel`.

    Args:
      sums, factors, scale: see `gate_rows`.
      values: u8[rows, width], codes of float8_e4m3fn.
      own_factors: f32[rows].
    """
    row = tl.program_id(0)
    factor = tl.load(factors + row)
    sums += row.to(tl.int64) * (2 * width)
    values += row.to(tl.int64) * width
    block = tl.arange(0, blocks)[:, None]
    at = block * (2 * half) + tl.arange(0, half)[None, :]
    inside = block < width // (2 * half)
    x0 = _gated(sums + at, scale + at, factor, inside, width)
    x1 = _gated(sums + (at + half), scale + (at + half), factor, inside, width)
    largest = tl.reduce(tl.reduce(larger(tl.abs(x0), tl.abs(x1)), 1, larger), 0, larger)
    inverse, own_factor = largest_to_code(largest, largest_code)
    inverse = tl.where(largest > smallest, inverse, 0.0)
    codes = tl.interleave((x0 * inverse).to(tl.float8e4nv), (x1 * inverse).to(tl.float8e4nv))
    out = values + block * (2 * half) + tl.arange(0, 2 * half)[None, :]
    tl.store(out, codes.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(own_factors + row, checked_factor(own_factor, largest, smallest))


@triton.jit
def _gated(sums, scale, factor, inside, width: tl.constexpr):
    """f32: SiLU of gates times ups."""
    gate = tl.load(sums, mask=inside, other=0.0).to(tl.float32)
    gate *= factor * tl.load(scale, mask=inside, other=0.0)
    up = tl.load(sums + width, mask=inside, other=0.0).to(tl.float32)
    up *= factor * tl.load(scale + width, mask=inside, other=0.0)
    return gate * tl.sigmoid(gate) * up
