"""Calling a Triton kernel from JAX, with jax-triton 0.3 or 0.4."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax_triton

# 0.4 renamed `out_shape`, and takes buffers that a kernel writes in place as references.
_TAKES_REFERENCES = "out_type" in inspect.signature(jax_triton.triton_call).parameters


def triton_call(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    in_place: int = 0,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> list[jax.Array]:
    """Launches `kernel` once.

    Args:
      kernel: a `triton.jit` function. Its parameters are a pointer per input, an unused one per buffer
        updated in place (0.3 passes the output that aliases the buffer there), a pointer per output, and
        the constants.
      inputs: arrays.
      outputs: shapes and dtypes of new arrays; what the kernel leaves out of them is undefined.
      in_place: how many of the inputs, from the first on, the kernel updates.
      grid: programs along up to three axes.
      num_warps, num_stages: see Triton.
      **constants: `constexpr` parameters.

    Returns:
      The updated inputs, then the outputs.
    """
    static = {"kernel": kernel, "grid": grid, "num_warps": num_warps, "num_stages": num_stages, **constants}
    if not _TAKES_REFERENCES:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:in_place]]
        aliases = {i: i for i in range(in_place)}
        results = jax_triton.triton_call(
            *inputs, out_shape=[*shapes, *outputs], input_output_aliases=aliases, **static
        )
        return list(results)
    references = [jax.new_ref(x) for x in inputs[:in_place]]
    unused = [0] * in_place
    created = jax_triton.triton_call(
        *references, *inputs[in_place:], *unused, out_type=list(outputs), **static
    )
    return [*(jax.freeze(reference) for reference in references), *created]
