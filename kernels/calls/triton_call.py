"""Calls Triton kernels from JAX."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jaxspec_kernels.calls.ptxas import find_ptxas
from jaxspec_kernels.op import device
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

    It has neither gradients nor a rule for `vmap`: an operation that needs them gives its own.

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
    leaves, tree = jax.tree.flatten(list(inputs))
    launch = _Launch(
        kernel=kernel,
        tree=tree,
        numbers=tuple(each if isinstance(each, int) else None for each in leaves),
        outputs=tuple((each.shape, jnp.dtype(each.dtype)) for each in outputs),
        in_place=in_place,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        # From Triton 3.10 on, products and sums are fused only on request.
        options=(("enable_fp_fusion", fuses), ("ptx_version", ptx_version())),
        constants=tuple(constants.items()),
    )
    arrays = [each for each in leaves if not isinstance(each, int)]
    results: list[jax.Array] = _launch_p.bind(*arrays, launch=launch)
    return results


class _Launch(NamedTuple):
    """A launch without its arrays: `tree` is that of the inputs, whose leaves are the `numbers` and, where
    these have None, the arrays."""

    kernel: Any
    tree: Any
    numbers: tuple[int | None, ...]
    outputs: tuple[tuple[tuple[int, ...], Any], ...]
    in_place: int
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    options: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        """The updated inputs, then the outputs."""
        left = iter(arrays)
        leaves = [next(left) if number is None else number for number in self.numbers]
        inputs = jax.tree.unflatten(self.tree, leaves)
        if not self.in_place:
            return self._call(inputs)

        @pl.run_state
        def update(references: tuple[list[Any], list[Any]]) -> None:
            updated, created = references
            results = self._call([*updated, *inputs[self.in_place :]])
            for reference, result in zip(created, results, strict=True):
                reference[...] = result

        # XLA drops the zeros, which are replaced.
        zeros = [jnp.zeros(shape, dtype) for shape, dtype in self.outputs]
        updated, created = update((inputs[: self.in_place], zeros))
        return [*updated, *created]

    def _call(self, inputs: Sequence[Any]) -> list[jax.Array]:
        results: list[jax.Array] = jax_triton.triton_call(
            *inputs,
            kernel=self.kernel,
            out_type=[jax.ShapeDtypeStruct(*each) for each in self.outputs],
            grid=self.grid,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            backend_options=dict(self.options),
            **dict(self.constants),
        )
        return results


# JAX drops a primitive without rules as a whole if its results are unused. It would ask jax-triton's own for
# a rule, which version 0.4.1 has in a form that jax 0.12 does not call.
_launch_p = Primitive("triton_launch")
_launch_p.multiple_results = True
_launch_p.def_impl(partial(xla.apply_primitive, _launch_p))


@_launch_p.def_abstract_eval
def _results(*arrays: Any, launch: _Launch) -> list[Any]:
    return [*arrays[: launch.in_place], *(ShapedArray(*each) for each in launch.outputs)]


mlir.register_lowering(
    _launch_p, mlir.lower_fun(lambda *arrays, launch: launch.run(*arrays), multiple_results=True)
)


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
