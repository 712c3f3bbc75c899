"""Bytes that a step must read, and the bandwidth that a copy reaches."""

import time

import jax
from flax import nnx

from jaxspec.drafters.none import NoDrafter
from jaxspec.engine.step import Models

# Of a head, what runs once per step; its layers and its output run once per draft.
_ONCE = ("fc", "input_norm", "feature_norms")


def weight_bytes(models: Models) -> int:
    """Bytes of weights that one step reads; of a token embedding it reads a few rows, which do not count."""
    target = nnx.state(models.target, nnx.Param)
    total = _size(target)
    if models.target.head is not None:
        total -= models.target.embedding.table[...].nbytes
    if isinstance(models.drafter, NoDrafter):
        return total
    drafter = nnx.state(models.drafter, nnx.Param)
    for name in drafter:
        passes = 1 if name in _ONCE else models.drafter.num_speculative_tokens
        total += passes * _size(drafter[name])
    return total


def cache_bytes(models: Models, *, batch_size: int, context: int, itemsize: int) -> int:
    """Bytes of keys and values that one step reads with so many tokens committed."""

    def per_position(shapes: tuple) -> int:
        return sum(2 * shape.num_kv_heads * shape.head_dim * itemsize for shape in shapes)

    target = per_position(models.target.cache_shapes)
    drafts = per_position(models.drafter.cache_shapes) * models.drafter.num_speculative_tokens
    return batch_size * context * (target + drafts)


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes read plus bytes written per second by a pass over an array, the median of ten."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,))
    # In place, so that no allocation is timed, and several at once, so that no launch is.
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


def _size(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
