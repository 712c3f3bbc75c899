"""Norms in Triton whose sums have one order (`engine.exact = true`); a program has one row."""

import math
from functools import partial
from typing import Any

import jax
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.rms_norm.reference import add_rms_norm as add_reference
from jaxspec_kernels.rms_norm.reference import rms_norm as reference
from jaxspec_kernels.rms_norm.reference import with_gradients


# All layers share one trace and one lowering.
@partial(jax.jit, static_argnames="eps")
def rms_norm(x: jax.Array, factors: jax.Array, eps: float) -> jax.Array:
    """See `reference.rms_norm`."""
    return _norm(x, factors, eps) if x.size else reference(x, factors, eps)


@with_gradients
def _norm(x: jax.Array, factors: jax.Array, eps: float) -> jax.Array:
    @jax.custom_batching.sequential_vmap
    def norm(x: jax.Array, factors: jax.Array) -> jax.Array:
        (normed,) = triton_call(_norm_kernel, (x, factors), [_like(x)], eps=eps, **_launch(x))
        return normed

    normed: jax.Array = norm(x, factors)
    return normed


@partial(jax.jit, static_argnames="eps")
def add_rms_norm(
    x: jax.Array, stream: jax.Array, bias: jax.Array | None, factors: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `reference.add_rms_norm`."""
    if not x.size:
        return add_reference(x, stream, bias, factors, eps)
    # Without a bias, this pointer is never read.
    inputs = (x, stream, x if bias is None else bias, factors)
    has_bias = bias is not None
    total, normed = triton_call(
        _add_norm_kernel, inputs, [_like(x)] * 2, eps=eps, has_bias=has_bias, **_launch(x)
    )
    return total, normed


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _launch(x: jax.Array) -> dict[str, Any]:
    *rows, width = x.shape
    block = max(triton.next_power_of_2(width), 16)
    return {
        "grid": (math.prod(rows),),
        "num_warps": min(max(block // 512, 1), 8),
        "fuses": False,
        "width": width,
        "block": block,
    }


@triton.jit
def _norm_kernel(x, factors, normed, eps: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    index = tl.arange(0, block)
    values = tl.load(x + row + index, mask=index < width, other=0.0).to(tl.float32)
    _store_normed(values, factors, normed + row, width, block, eps)


@triton.jit
def _add_norm_kernel(
    x,
    stream,
    bias,
    factors,
    total,
    normed,
    eps: tl.constexpr,
    has_bias: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    index = tl.arange(0, block)
    inside = index < width
    dtype: tl.constexpr = total.dtype.element_ty
    values = tl.load(x + row + index, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        values = (values + tl.load(bias + index, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        values = values.to(tl.float32)
    values += tl.load(stream + row + index, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(dtype)
    tl.store(total + row + index, rounded, mask=inside)
    _store_normed(rounded.to(tl.float32), factors, normed + row, width, block, eps)


@triton.jit
def _store_normed(values, factors, normed, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr):
    """Stores the norm of one row, which is 0 past its end."""
    index = tl.arange(0, block)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    dtype: tl.constexpr = normed.dtype.element_ty
    factor = tl.load(factors + index, mask=index < width, other=0.0).to(tl.float32)
    rounded = (values * scale).to(dtype).to(tl.float32)
    tl.store(normed + index, (rounded * factor).to(dtype), mask=index < width)
