"""Random weights, generated on the devices that hold them, so that no device holds another's part."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bench.random_codes import random_coded_experts, random_codes
from bench.random_mxfp4 import random_mxfp4
from jaxspec.models.families.deepseek.deepseek_v4 import ExpertTable
from jaxspec.sharding import replicated, sharding
from jaxspec.weights.expert_sources import Stacked
from jaxspec.weights.loading import declared
from jaxspec.weights.packed_weights import packed_sharding
from jaxspec.weights.parameters import Fused, Initial, NoKeys, Projection

Module = TypeVar("Module", bound=nnx.Module)


def random_module(
    make: Callable[[nnx.Rngs], Module],
    mesh: Mesh,
    *,
    seed: int = 0,
    packed_experts: bool = False,
    codes: str = "",
    quantized: tuple[str, ...] = ("_proj.weight",),
    activations: str | None = None,
    is_split: bool = True,
) -> Module:
    """A module with random weights.

    Args:
      make: constructs the module; evaluated only for shapes.
      mesh: the devices.
      seed: seed of the weights.
      packed_experts: make experts in MXFP4.
      codes: of the layers' matrices: "fp8" in blocks of 128 x 128, "fp8-by-output" with a scale for every
        output, or "int4" in groups of 128, "awq" with zero points.
      quantized: the ends of these matrices' names.
      activations: `EngineConfig.gpu_activations`.
      is_split: split weights over `mesh`; otherwise every device has all of them.
    """
    module = nnx.eval_shape(lambda: make(NoKeys()))
    key = jax.random.key(seed)
    for i, (variable, _) in enumerate(declared(module)):
        axes, shape = variable.get_metadata("axes"), variable.get_value().shape
        placed_by = axes if is_split else None
        if isinstance(table := variable.get_metadata("source"), ExpertTable):
            experts = np.arange(math.prod(shape), dtype=np.int32).reshape(shape) % table.num_experts
            variable.set_value(jax.device_put(experts, sharding(mesh, placed_by, shape)))
            continue
        if not isinstance(variable, nnx.Param):
            continue  # a table, filled by the caller
        if packed_experts and {"embed", "expert_inner"} <= set(axes):
            fill, place = _packed(random_mxfp4, (("shape", shape),), mesh, placed_by)
        elif codes and _is_quantized(variable.get_metadata("source"), quantized):
            source = variable.get_metadata("source")
            options: dict[str, Any] = {"shape": shape, "bits": 4 if codes in ("int4", "awq") else 8}
            if codes == "fp8" and shape[-1] % 128 == 0 and mesh.size == 1:
                options["scale_rows"] = 128
            if codes == "fp8-by-output":
                options["group"] = 0
            if codes == "awq":
                options["has_zero"] = True
            if not isinstance(source, Stacked):
                options |= {"activations": activations, "inner": len(source.in_shape)}
            make_codes = random_coded_experts if isinstance(source, Stacked) else random_codes
            fill, place = _packed(make_codes, tuple(options.items()), mesh, placed_by)
        else:
            initial, source = (variable.get_metadata(name) for name in ("initial", "source"))
            fill, place = _copied(initial, source), sharding(mesh, placed_by, shape)
        variable.set_value(_filling(fill, place)(jax.random.fold_in(key, i)))
    return module


def put_whole(module: nnx.Module, mesh: Mesh) -> None:
    """Puts all variables that are not parameters on every device."""
    for variable, _ in declared(module):
        if not isinstance(variable, nnx.Param):
            variable.set_value(jax.device_put(variable.get_value(), replicated(mesh)))


def _is_quantized(source: Any, names: tuple[str, ...]) -> bool:
    """Whether a parameter is made of matrices with these ends of their names."""
    if isinstance(source, Projection | Fused) and not source.in_shape:
        return False
    is_used = isinstance(source, Projection | Fused | Stacked)
    return is_used and source.tensors[0][0].endswith(names)


@cache
def _packed(
    make: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    mesh: Mesh,
    axes: tuple[str | None, ...] | None,
) -> tuple[Any, Any]:
    """Fills a parameter by `make`, and where it is placed; the same for all layers."""
    weight = jax.eval_shape(partial(make, **dict(options)), jax.random.key(0))
    place = packed_sharding(weight, mesh, axes)
    assert place is not None, "the devices' parts would cut a block"
    return lambda key: make(key(), **dict(options)), place


@cache
def _copied(initial: Initial, source: Any) -> Callable[[Callable[[], jax.Array]], jax.Array]:
    """Fills a parameter with copied key/value heads with the numbers that it has without copies."""
    parts = source.parts if isinstance(source, Fused) else (source,)
    copies = max(part.copies if isinstance(part, Projection) else 1 for part in parts)
    if copies == 1:
        return initial
    along = -3 if isinstance(source, Fused) else -2
    heads = initial.shape[along]
    once = [*initial.shape]
    once[along] //= copies
    if isinstance(source, Projection):
        return lambda key: replace(initial, shape=tuple(once))(key).repeat(copies, axis=along)
    group = source.parts[0].out_shape[-2]
    once[-2] += group * (copies - 1)

    def fill(key: Callable[[], jax.Array]) -> jax.Array:
        value = replace(initial, shape=tuple(once))(key)
        queries, others = jnp.split(value, [group * copies], axis=-2)
        queries = queries.reshape(*once[:along], heads, group, once[-1])
        return jnp.concatenate([queries, others.repeat(copies, axis=along)], axis=-2)

    return fill


@cache
def _filling(fill: Callable[[Callable[[], jax.Array]], Any], place: Any) -> Callable[[jax.Array], Any]:
    """One compiled program for all weights with the same shape and sharding."""
    return jax.jit(lambda key: fill(lambda: key), out_shardings=place)
