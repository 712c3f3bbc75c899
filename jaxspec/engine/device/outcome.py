"""What rows that were judged emit; a dispatch's outcomes come back to the host as one array."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.engine.host.request import NOTHING, Reported
from jaxspec.engine.host.scheduler import Result
from jaxspec.sampling import Logprobs, TokenLogprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What n slots that decode emitted in one step, or n chunks of prompts; of a dispatch, with a leading
    axis of steps.

    Attributes:
      tokens: i32[n, Q], a place for the token after each row; after a prompt it is one.
      num_tokens: i32[n], how many of them are emitted; 0 for a slot that is not active, and for a chunk that
        does not end a prompt.
      drafted, accepted: i32[n], drafts that were verified, and how many of them the target accepted,
        including any that a stop cut off; without meaning where nothing is emitted.
      done: bool[n], whether the request ends with them.
      failed: bool[n], whether it ends because the logits after the last emitted token are not finite.
      logprobs: of `tokens`; without meaning past `num_tokens`, and for a token that was given.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    done: jax.Array
    failed: jax.Array
    logprobs: TokenLogprobs

    @classmethod
    def none(cls, *shape: int, logprobs: Logprobs = Logprobs.NONE, vocab_size: int = 0) -> "Outcome":
        """Nothing emitted; `shape` is that of `tokens`. With `logprobs`, `vocab_size` is needed, too."""
        counts, ends = jnp.zeros(shape[:-1], jnp.int32), jnp.zeros(shape[:-1], bool)
        reported = TokenLogprobs.none(shape, logprobs, vocab_size)
        return cls(jnp.zeros(shape, jnp.int32), counts, counts, counts, ends, ends, reported)


Outcomes = tuple[Outcome, Outcome]
"""Those of a dispatch, with a leading axis of steps: of the slots that decode, and of the chunks."""


class _Place(NamedTuple):
    """Where an array stands among the words of its program's outcomes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedOutcomes:
    """Outcomes as one array on the device, which one transfer brings to the host; or what was scored.

    Attributes:
      words: i32[N], all their arrays, one after another.
      hidden: hidden states that a program for scores returns, each of its own.
      places: where each array stands in `words`; static.
      structure: their tree; static.
    """

    words: jax.Array
    hidden: tuple[jax.Array, ...]
    places: tuple[_Place, ...] = field(metadata={"static": True})
    structure: Any = field(metadata={"static": True})


def pack_outcomes(outcomes: Any, hidden: tuple[jax.Array, ...] = ()) -> PackedOutcomes:
    """Packs, inside a program, what `read_outcomes` unpacks on the host."""
    leaves, structure = jax.tree.flatten(outcomes)
    words = jnp.concatenate([_words(leaf).ravel() for leaf in leaves])
    places, start = [], 0
    for leaf in leaves:
        places.append(_Place(start, start + leaf.size, leaf.shape, leaf.dtype))
        start += leaf.size
    return PackedOutcomes(words, hidden, tuple(places), structure)


def read_outcomes(packed: PackedOutcomes) -> Any:
    """Unpacks what `pack_outcomes` packed into arrays on the host; waits for the program to end."""
    words = np.asarray(packed.words)
    arrays = [
        (words[start:stop] > 0 if dtype == np.bool_ else words[start:stop].view(dtype)).reshape(shape)
        for start, stop, shape, dtype in packed.places
    ]
    return jax.tree.unflatten(packed.structure, arrays)


def _words(x: jax.Array) -> jax.Array:
    """As i32; floats by their bits."""
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x.astype(jnp.int32)


def results(outcome: Outcome) -> list[Result]:
    """The result of every slot, or of every chunk, over all steps."""
    if not outcome.num_tokens.size:
        return []
    counts = np.asarray(outcome.num_tokens).T  # [n, S], as everything below
    has_tokens = counts > 0
    of_slot = np.asarray(outcome.tokens).swapaxes(0, 1)
    is_emitted = np.arange(of_slot.shape[-1]) < counts[..., None]
    tokens = of_slot[is_emitted].tolist()
    reported = [
        np.asarray(x).swapaxes(0, 1)[is_emitted].tolist() if x.size else []
        for x in (outcome.logprobs.chosen, outcome.logprobs.top_tokens, outcome.logprobs.top)
        if outcome.logprobs.chosen.size
    ]
    passes = [np.asarray(x).T[has_tokens].tolist() for x in (outcome.drafted, outcome.accepted)]
    verified = list(zip(*passes, strict=True))
    num_tokens, num_passes = counts.sum(axis=1), has_tokens.sum(axis=1)
    ended = [np.asarray(x).any(axis=0) for x in (outcome.done, outcome.failed)]
    rows, token, step = [], 0, 0
    for more_tokens, more_passes, done, failed in np.stack([num_tokens, num_passes, *ended], axis=1).tolist():
        last_token, last_step = token + more_tokens, step + more_passes
        logprobs = Reported(*(each[token:last_token] for each in reported)) if reported else NOTHING
        of_passes = verified[step:last_step]
        rows.append(Result(tokens[token:last_token], of_passes, bool(done), bool(failed), logprobs))
        token, step = last_token, last_step
    return rows
