"""Automata in the device's memory: one slab of words for all of them, and look-ups in it.

A state is the place of its record in the slab, so that it is all a slot needs to keep. State 0 is that of a
request without a grammar: it allows every token and stays. It also follows a token that was not allowed,
which only rows behind a rejected draft see.

    record       the places of the state's mask, of its row of transitions and of the automaton's classes, and
                 the only token that it allows, -1 if there are several
    mask         a bit for every token, the lowest first; those of states that allow the same tokens are one
    classes      the class of every token, two to a word
    transitions  the state after a token of each class, 0 where it is not allowed
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RECORD = 4
"""Words of a record."""
FREE = 0
"""The state of a request without a grammar."""
MAX_FORCED = 6
"""The most tokens without an alternative that a step verifies behind its drafts."""
FREE_RECORD = (0, 0, 0, -1)
"""What stands at `FREE`. The functions here do not follow its places."""


class Record(NamedTuple):
    """What the slab says of states, i32[...] each."""

    mask: jax.Array
    transitions: jax.Array
    classes: jax.Array
    forced: jax.Array


def records(slab: jax.Array, state: jax.Array) -> Record:
    """The records of states i32[...]."""
    words = _words(slab, state[..., None] + jnp.arange(RECORD, dtype=jnp.int32))
    return Record(*(words[..., index] for index in range(RECORD)))


def allowed(slab: jax.Array, state: jax.Array, size: int) -> jax.Array:
    """bool[..., size]: which of the first `size` tokens may come in each state, i32[...]."""
    words = -(-size // 32)
    mask = _words(slab, records(slab, state).mask[..., None] + jnp.arange(words, dtype=jnp.int32))
    bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    may_come = bits.reshape(*state.shape, 32 * words)[..., :size] > 0
    return may_come | (state == FREE)[..., None]


def allowed_of(slab: jax.Array, state: jax.Array, tokens: jax.Array) -> jax.Array:
    """bool[..., W]: which of some tokens, i32[W], may come in each state, i32[...]."""
    mask = _words(slab, records(slab, state).mask[..., None] + tokens // 32)
    return ((mask >> tokens % 32) & 1 > 0) | (state == FREE)[..., None]


def advance(slab: jax.Array, state: jax.Array, token: jax.Array) -> jax.Array:
    """i32[...]: the state after a token, i32[...], of each state; `FREE` after one that is not allowed."""
    record = records(slab, state)
    token = jnp.maximum(token, 0)
    pair = _words(slab, record.classes + token // 2)
    of_token = (pair >> 16 * (token % 2)) & 0xFFFF
    return jnp.where(state == FREE, FREE, _words(slab, record.transitions + of_token))


def forced(slab: jax.Array, state: jax.Array) -> jax.Array:
    """i32[...]: the only token that each state allows; -1 if there are several."""
    return jnp.where(state == FREE, -1, _words(slab, state + 3))


def _words(slab: jax.Array, index: jax.Array) -> jax.Array:
    return slab.at[index].get(mode="clip", wrap_negative_indices=False)


class Packed(NamedTuple):
    """An automaton as words for the slab.

    Attributes:
      words: i32[N], with places counted from the first word.
      is_place: bool[N], the words that are places or states.
      states: i32[S], the place of each state's record.
    """

    words: np.ndarray
    is_place: np.ndarray
    states: np.ndarray

    def at(self, place: int) -> np.ndarray:
        """The words for a place in the slab."""
        return np.where(self.is_place, self.words + place, self.words).astype(np.int32)
