"""Checks of what a drafter gives the engine, since anyone may have written it.

Shapes and dtypes are checked while a program is traced. Token ids and counts are only known when it runs:
they are brought into range, so that no drafter can make an engine emit what is not a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.attention import CacheShape, LayerCache, LayerCacheShape, RowBlock
from jaxspec.drafters.base import Drafter, Proposal, Rows, Target
from jaxspec.errors import OneLineError
from jaxspec.sampling import DraftVocabulary
from jaxspec.sharding import num_parts

Caches = tuple[LayerCache, ...]


class DrafterError(OneLineError):
    """A drafter does not keep its contract; the message names its class and what was expected."""


def checked_caches(drafter: Drafter) -> tuple[LayerCacheShape, ...]:
    """The drafter's `cache_shapes`.

    Raises:
      DrafterError: they are not a tuple with the shape or shapes of each layer.
    """
    shapes: Any = drafter.cache_shapes
    of_layers = shapes if isinstance(shapes, tuple) else (shapes,)
    parts = [part for layer in of_layers for part in (layer if isinstance(layer, tuple) else (layer,))]
    if not isinstance(shapes, tuple) or not all(isinstance(part, CacheShape) for part in parts):
        raise DrafterError(
            f"{type(drafter).__name__}.cache_shapes must be a tuple with a CacheShape, or a tuple of these, "
            f"for each layer, got {shapes!r}"
        )
    return shapes


def checked_proposal(
    drafter: Drafter, target: Target, cache: Caches, proposed: Any, *, batch_size: int, num_drafts: int
) -> tuple[Proposal, Caches]:
    """What `Drafter.propose` returned, with every id and count in range.

    An id that is not in the target's vocabulary becomes one that is, and is verified like any other. If the
    drafts come with logits, they end before it: it cannot have been drawn from them.

    Args:
      cache: what `propose` was given; it may have been donated.
      proposed: what it returned.
      batch_size, num_drafts: B and K.

    Raises:
      DrafterError: something is missing, or has another type, shape or dtype.
    """
    name = f"{type(drafter).__name__}.propose"
    proposal, after = _pair(name, proposed, "a Proposal")
    if not isinstance(proposal, Proposal):
        raise DrafterError(
            f"{name} must return a Proposal and the cache, got {_form(proposal)} for the first"
        )
    _check_form(f"{name} returned tokens", proposal.tokens, jnp.int32, (batch_size, num_drafts), "[B, K]")
    _check_form(f"{name} returned count", proposal.count, jnp.int32, (batch_size,), "[B]")
    vocabulary, vocab_size = drafter.draft_vocab, target.config.vocab_size
    if proposal.logits is not None:
        width = vocab_size if vocabulary is None else vocabulary.target_ids.size
        of = "the target's" if vocabulary is None else "its draft"
        what = f"[B, K, W], where W is {of} vocabulary"
        is_part = getattr(proposal.logits, "shape", ())[-1:] == (width // num_parts(),)
        shape = (batch_size, num_drafts, width // num_parts() if is_part else width)
        _check_form(f"{name} returned logits", proposal.logits, jnp.float32, shape, what)
    if proposal.confidence is not None:
        what = f"{name} returned confidence"
        _check_form(what, proposal.confidence, jnp.float32, (batch_size, num_drafts), "[B, K]")
    _check_cache(name, after, cache)
    return _in_range(proposal, vocabulary, vocab_size=vocab_size), after


def checked_refresh(drafter: Drafter, rows: Rows, cache: Caches, refreshed: Any) -> tuple[jax.Array, Caches]:
    """What `Drafter.refresh` returned: states [N', M'] and the cache.

    Args:
      rows, cache: what `refresh` was given.
      refreshed: what it returned.

    Raises:
      DrafterError: something is missing, or has another type, shape or dtype.
    """
    name = f"{type(drafter).__name__}.refresh"
    hidden, after = _pair(name, refreshed, "states")
    if not hasattr(hidden, "dtype") or not jnp.issubdtype(hidden.dtype, jnp.floating) or hidden.ndim != 2:
        raise DrafterError(f"{name} returned {_form(hidden)}, not states of floats [N', M']")
    check_rows(hidden, rows.blocks, name)
    size = drafter.needs.state_size
    if hidden.shape[1] != size:
        raise DrafterError(f"{name} returned states of {hidden.shape[1]} numbers, not of state_size, {size}")
    _check_cache(name, after, cache)
    return hidden, after


def check_rows(hidden: jax.Array, blocks: Sequence[RowBlock], name: str) -> None:
    """Checks that a network, which may not be one of ours, returned only the rows whose output is needed."""
    wanted = sum(block.outputs.positions.size for block in blocks)
    if len(hidden) != wanted:
        raise DrafterError(
            f"{name} returned {len(hidden)} rows instead of {wanted}: it must take those whose output is "
            "needed (`outputs` of the memory or of the rows)"
        )


@partial(jax.jit, static_argnames="vocab_size", inline=True)
def _in_range(proposal: Proposal, vocabulary: DraftVocabulary | None, *, vocab_size: int) -> Proposal:
    drafts = proposal.tokens.shape[1]
    tokens = jnp.clip(proposal.tokens, 0, vocab_size - 1)
    count = jnp.clip(proposal.count, 0, drafts)
    if proposal.logits is not None:
        is_drawn = tokens == proposal.tokens
        if vocabulary is not None:
            is_drawn &= vocabulary.draft_ids.at[tokens].get(mode="promise_in_bounds") >= 0
        # Column by column it becomes a part of what reads the count; `argmin` would be a kernel on a GPU.
        for column in reversed(range(drafts)):
            count = jnp.where(is_drawn[:, column], count, jnp.minimum(count, column))
    return replace(proposal, tokens=tokens, count=count)


def _pair(name: str, returned: Any, first: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise DrafterError(f"{name} must return {first} and the cache, got {_form(returned)}")
    return returned


def _check_form(what: str, value: Any, dtype: Any, shape: tuple[int, ...], axes: str) -> None:
    expected = f"{jnp.dtype(dtype).name}{list(shape)}"
    if _form(value) != expected:
        raise DrafterError(f"{what} {_form(value)}, expected {expected}, {axes}")


def _check_cache(name: str, after: Any, before: Caches) -> None:
    if jax.tree.map(_form, after) != jax.tree.map(_form, before):
        now, then = (", ".join(map(_form, jax.tree.leaves(tree))) or "none" for tree in (after, before))
        raise DrafterError(f"{name} returned other caches ({now}) than it was given ({then})")


def _form(value: Any) -> str:
    """The dtype and shape of an array, the type's name of anything else."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else type(value).__name__
