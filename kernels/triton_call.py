"""Calls Triton kernels from JAX."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import pallas as pl
from jaxspec_kernels.op import device
from jaxspec_kernels.ptxas import find_ptxas
from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version


def triton_call(
    kernel: Any,
    inputs: Sequence["jax.Array | int | jax_triton.TensorDescriptor"],
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    in_place: int = 0,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    fuses: bool = True,
    **constants: Any,
) -> list[jax.Array]:
    """Launches `kernel` once.

    Args:
      kernel: a `triton.jit` function. Its parameters are a pointer, a number or a descriptor per input, a
        pointer per output, and the constants.
      inputs: arrays, numbers, and descriptors of arrays whose blocks the card's copy engine (TMA) loads.
      outputs: shapes and dtypes of new arrays; elements that the kernel does not write are undefined.
      in_place: how many of the inputs, from the first on, the kernel updates in place.
      grid: the number of programs along up to three axes.
      num_warps, num_stages: Triton's launch options.
      fuses: whether the compiler may make one operation of a multiplication and an addition, which rounds
        once instead of twice. Where it does so depends on tiles.
      **constants: `constexpr` parameters.

    Returns:
      The updated inputs, then the outputs.
    """
    # From Triton 3.10 on, products and sums are fused only on request.
    options = {"enable_fp_fusion": fuses, "ptx_version": ptx_version()}

    # JAX drops this operation as a whole if its results are unused. If it looked inside, it would call
    # jax-triton 0.4.1's rule for unused results, which fails with jax 0.12.
    @pl.run_state
    def launch(references: tuple[list[Any], list[Any]]) -> None:
        updated, created = references
        results = jax_triton.triton_call(
            *updated,
            *inputs[in_place:],
            kernel=kernel,
            out_type=list(outputs),
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            backend_options=options,
            **constants,
        )
        for reference, result in zip(created, results, strict=True):
            reference[...] = result

    # XLA drops the zeros, which are replaced.
    arrays: list[Any] = list(inputs[:in_place])
    updated, created = launch((arrays, [jnp.zeros(x.shape, x.dtype) for x in outputs]))
    return [*updated, *created]


@cache
def ptx_version() -> int:
    """The newest version of PTX that Triton writes and jaxlib's `ptxas` accepts, as 90 for 9.0."""
    capability = device().compute_capability
    own = ptx_get_version(get_ptxas(int(capability.replace(".", ""))).version)
    found = find_ptxas()
    return own if found is None else min(own, found.ptx_version)


@cache
def has_tma() -> bool:
    """Whether the GPU's copy engine loads blocks of arrays, as Hopper's and later ones do."""
    return int(device().compute_capability.partition(".")[0]) >= 9
