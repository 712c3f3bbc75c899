"""Random weights, generated on the devices that hold them, so that no device holds another's part."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from bench.random_mxfp4 import random_mxfp4
from jaxspec.models.loading import declared
from jaxspec.models.packed_weights import packed_sharding
from jaxspec.sharding import replicated, sharding

Module = TypeVar("Module", bound=nnx.Module)


def random_module(
    make: Callable[[nnx.Rngs], Module],
    mesh: Mesh,
    *,
    seed: int = 0,
    packed_experts: bool = False,
    is_split: bool = True,
) -> Module:
    """A module with random weights.

    Args:
      make: constructs the module; evaluated only for shapes.
      mesh: the devices.
      seed: seed of the weights.
      packed_experts: make experts in MXFP4.
      is_split: split weights over `mesh`; otherwise every device has all of them.
    """
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    key = jax.random.key(seed)
    for i, (variable, _) in enumerate(declared(module)):
        axes, shape = variable.get_metadata("axes"), variable.get_value().shape
        if not isinstance(variable, nnx.Param):
            continue  # a table, filled by the caller
        placed_by = axes if is_split else None
        if packed_experts and {"embed", "expert_inner"} <= set(axes):
            fill, place = _packed(shape, mesh, placed_by)
        else:
            fill, place = variable.get_metadata("initial"), sharding(mesh, placed_by, shape)
        variable.set_value(_filling(fill, place)(jax.random.fold_in(key, i)))
    return module


def put_whole(module: nnx.Module, mesh: Mesh) -> None:
    """Puts all variables that are not parameters on every device."""
    for variable, _ in declared(module):
        if not isinstance(variable, nnx.Param):
            variable.set_value(jax.device_put(variable.get_value(), replicated(mesh)))


@cache
def _packed(shape: tuple[int, ...], mesh: Mesh, axes: tuple[str | None, ...] | None) -> tuple[Any, Any]:
    make = partial(random_mxfp4, shape=shape)
    weight = jax.eval_shape(make, jax.random.key(0))
    return lambda key: make(key()), packed_sharding(weight, mesh, axes)


@cache
def _filling(fill: Callable[[Callable[[], jax.Array]], Any], place: Any) -> Callable[[jax.Array], Any]:
    """One compiled program for all weights with the same shape and sharding."""
    return jax.jit(lambda key: fill(lambda: key), out_shardings=place)
