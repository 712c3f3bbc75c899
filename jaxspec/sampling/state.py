"""The sampling parameters of all slots, as arrays."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """The part of each slot's `SamplingParams` that a compiled program needs.

    Attributes:
      temperature: f32[B], 0 for greedy.
      top_k: i32[B], 0 for off.
      top_p: f32[B], 1 for off.
      min_p: f32[B], 0 for off.
      seed: u32[B, 2], see `seed_words`.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a seed in [0, 2^64)."""
    return seed & 0xFFFFFFFF, seed >> 32
