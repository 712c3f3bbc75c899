"""The bytes that a step must read, and the bandwidth of a copy."""

import math
import time

import jax
import numpy as np
from flax import nnx

from jaxspec.attention import CacheShape, StateShape
from jaxspec.drafters.base import Target
from jaxspec.drafters.one_pass import OnePassDrafter
from jaxspec.engine.device.step import Models
from jaxspec.sharding import bytes_by_device

# Parts of a head that run once per step; its layers and output head run once per draft.
_ONCE = ("fc", "input_norm", "feature_norms")


def weight_bytes(models: Models, *, batch_size: int) -> int:
    """Bytes of weights that one step reads on each device, not counting token embeddings.

    Of the routed experts of a layer, as many count as a router without preferences is expected to choose for
    all rows together.
    """
    drafts = models.drafter.num_speculative_tokens
    target = models.target
    weights = nnx.state(target, nnx.Param)
    total = _read(weights, target, batch_size * (drafts + 1))
    if "head" in weights:
        total -= _read(weights["embedding"], target, batch_size)
    drafter = nnx.state(models.drafter, nnx.Param)
    passes = _passes(models)
    for name in drafter:
        if name == "markov":
            total += drafts * sum(
                _read(drafter[name][part], target, 1) for part in drafter[name] if part != "embedding"
            )
            continue
        once = _read(drafter[name], target, batch_size)
        total += once if name in _ONCE else passes * once
    if "head" not in drafter:
        # The drafter uses the target's output head.
        total += passes * sum(map(bytes_by_device, jax.tree.leaves(target.output_kernel)))
    return total


def _passes(models: Models) -> int:
    """How often the drafter's layers run for the drafts of a step."""
    return 1 if isinstance(models.drafter, OnePassDrafter) else models.drafter.num_speculative_tokens


def cache_bytes(
    models: Models, *, batch_size: int, context: int, itemsize: int, is_coded: bool = False, devices: int = 1
) -> int:
    """Bytes of keys and values that one step reads on each device, with `context` tokens in every slot, and
    of states that it reads and writes.

    Args:
      itemsize: bytes of a number.
      is_coded: whether keys and values are in 8 bits, each with a byte for its scale.
    """

    def of_head(shape: CacheShape) -> int:
        return shape.head_dim + 1 if is_coded and shape.planes == 2 else shape.head_dim * itemsize

    def heads(count: int, is_split: bool = True) -> int:
        return count // devices if is_split and count % devices == 0 else count

    def per_position(shapes: tuple, is_split: bool = True) -> int:
        return sum(
            shape.planes * heads(shape.num_kv_heads, is_split) * of_head(shape) // shape.positions_per_entry
            for layer in shapes
            for shape in (layer if isinstance(layer, tuple) else (layer,))
            if isinstance(shape, CacheShape)
        )

    def of_state(shape: StateShape) -> int:
        sizes = (
            math.prod(each) * (np.dtype(own).itemsize if own else itemsize) for each, own in shape.states
        )
        return heads(shape.num_heads) * sum(sizes)

    target = per_position(models.target.cache_shapes)
    drafter = models.drafter
    drafts = per_position(drafter.cache_shapes, drafter.needs.is_split) * _passes(models)
    states = sum(of_state(shape) for shape in models.target.cache_shapes if isinstance(shape, StateShape))
    return batch_size * (context * (target + drafts) + 2 * states)


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes read plus bytes written per second by a pass over an array: the median of ten measurements."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,))
    # In place and several at a time, so that neither allocation nor launching is timed.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(x).block_until_ready()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(8):
            x = add(x)
        x.block_until_ready()
        times.append((time.perf_counter() - begin) / 8)
    return 2 * x.nbytes / sorted(times)[len(times) // 2]


def _read(tree: object, target: Target, rows: int) -> int:
    """Bytes of the weights in a tree that `rows` rows read."""
    moe = target.config.moe
    total = 0
    for leaf in jax.tree.leaves(tree):
        share = 1.0
        if moe is not None and leaf.ndim >= 3 and leaf.shape[0] == moe.num_experts:
            share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** rows
        total += round(share * bytes_by_device(leaf))
    return total
