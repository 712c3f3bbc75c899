"""Rejection sampling of drafts: the emitted tokens have the target's distribution.

Drafts that were sampled are verified as a block (`block.py`). One-hot drafts are verified one by one, because
block verification would accept no more of them: Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", ICML 2023, algorithm 1.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxspec_kernels import random
from jaxspec_kernels.argmax import argmax
from jaxspec_kernels.random import Purpose
from jaxspec_kernels.row_sum import row_log

from jaxspec.sampling.block import log_acceptance, log_prefixes
from jaxspec.sampling.draw import sample
from jaxspec.sampling.logits import log_sum_exp, process_logits
from jaxspec.sampling.mode import SamplingMode
from jaxspec.sampling.state import SamplingState
from jaxspec.sampling.vocabulary import DraftVocabulary
from jaxspec.sharding import split_over


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """The result of verifying the slots' drafts.

    Attributes:
      accepted: i32[B], how many leading drafts were accepted, 0 to K.
      token: i32[B], the token after them: the recovered token of the first rejected row, or the bonus token
        of the row after the last draft.
      drawn_from: [B, Q, V], the logits of the distribution that each row's token is drawn from.
    """

    accepted: jax.Array
    token: jax.Array
    drawn_from: jax.Array


def verify(
    logits: jax.Array,
    drafts: jax.Array,
    draft_count: jax.Array,
    draft_logits: jax.Array | None,
    draft_vocab: DraftVocabulary | None,
    sampling: SamplingState,
    positions: jax.Array,
    *,
    mode: SamplingMode,
    vocab_size: int | None = None,
    is_forced: jax.Array | None = None,
) -> Verdict:
    """Accepts a prefix of the drafts and draws the token after it.

    With K = 0 this is plain decoding. Recovered and bonus tokens are drawn from independent random streams,
    each keyed by the row's position. Acceptance is drawn from a third stream, keyed by the first row's
    position.

    Args:
      logits: [B, Q, V] raw target logits with Q = K + 1; row i verifies draft i.
      drafts: i32[B, K] target ids; a negative id is never accepted.
      draft_count: i32[B], the number of drafts; columns past it are ignored.
      draft_logits: f32[B, K, Vd], the logits that each draft was drawn from, already divided by the
        temperature; None if the proposals are one-hot.
      draft_vocab: maps the draft vocabulary to the target's; None if they are the same.
      sampling: the parameters of the B slots.
      positions: i32[B, Q], position of each row.
      mode: any mode that serves every slot; all of these give the same result.
      vocab_size: V over all devices if `logits` may be this device's part, which only `GREEDY` allows; None
        if they are whole.
      is_forced: bool[B, K], drafts that are the only tokens which target and drafter may give, whatever
        `draft_logits` say; None for none.
    """
    if mode == SamplingMode.GREEDY:
        best = argmax(logits, split_over(logits.shape[-1], vocab_size or logits.shape[-1]))
        accepted = count_leading(best[:, :-1] == drafts, draft_count)
        return Verdict(accepted, row_at(best, accepted), logits)
    processed = process_logits(logits, sampling, mode=mode)
    if drafts.shape[1] == 0:
        token = sample(processed[:, 0], sampling, positions[:, 0], Purpose.BONUS)
        return Verdict(jnp.zeros_like(draft_count), token, processed)
    accepted, log_prefix = _accept(
        processed, drafts, draft_count, draft_logits, draft_vocab, sampling, positions, is_forced
    )
    token = token_after(
        processed, accepted, log_prefix, drafts, draft_count, draft_logits, draft_vocab, sampling, positions
    )
    return Verdict(accepted, token, processed)


def count_leading(accepts: jax.Array, draft_count: jax.Array) -> jax.Array:
    """i32[B]: how many leading columns of bool[B, K] are true, up to `draft_count` i32[B]."""
    drafted = jnp.arange(accepts.shape[1]) < draft_count[:, None]
    return jnp.cumprod((accepts & drafted).astype(jnp.int32), axis=1).sum(axis=1)


def _count_through_last(accepts: jax.Array, draft_count: jax.Array) -> jax.Array:
    """i32[B]: one plus the index of the last true column of bool[B, K] before `draft_count`; 0 if none is."""
    columns = jnp.arange(1, accepts.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(accepts & (columns <= draft_count[:, None]), columns, 0).max(axis=1)


def row_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]] for each slot b: x [B, Q, ...] and index i32[B], in range, give [B, ...]."""
    rows = jnp.arange(x.shape[0], dtype=index.dtype)
    return x.at[rows, index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def token_after(
    processed: jax.Array,
    accepted: jax.Array,
    log_prefix: jax.Array | float,
    drafts: jax.Array,
    draft_count: jax.Array,
    draft_logits: jax.Array | None,
    draft_vocab: DraftVocabulary | None,
    sampling: SamplingState,
    positions: jax.Array,
) -> jax.Array:
    """The token i32[B] after the accepted drafts.

    Args:
      processed: f32[B, Q, V], from `process_logits`.
      accepted: i32[B], accepted drafts.
      log_prefix: f32[B, 1], log p of the accepted prefix (see `block.py`). The residual distribution is made
        of P times p. 0 if drafts are verified one by one.
      drafts, draft_count, draft_logits, draft_vocab, sampling, positions: as in `verify`.
    """
    row = row_at(processed, accepted)
    position = row_at(positions, accepted)
    draft_columns = drafts.shape[1]
    if draft_columns == 0:
        return sample(row, sampling, position, Purpose.BONUS)
    rejected = accepted < draft_count
    column = jnp.minimum(accepted, draft_columns - 1)
    log_p = row - log_sum_exp(row)[..., None]
    if draft_logits is None:
        proposed = jnp.arange(row.shape[-1]) == row_at(drafts, column)[:, None]
        residual = jnp.where(proposed, -jnp.inf, log_p)
    else:
        log_q = _log_proposal(row_at(draft_logits, column), draft_vocab)
        residual = _log_residual(log_prefix + log_p, log_q)
    # An empty residual means that p equals q up to rounding. Then draw from p.
    recovers = rejected & (sampling.temperature > 0) & (residual.max(axis=-1) > -jnp.inf)
    purpose = jnp.where(rejected, Purpose.RECOVER, Purpose.BONUS)
    return sample(jnp.where(recovers[:, None], residual, row), sampling, position, purpose)


def _accept(
    processed: jax.Array,
    drafts: jax.Array,
    draft_count: jax.Array,
    draft_logits: jax.Array | None,
    draft_vocab: DraftVocabulary | None,
    sampling: SamplingState,
    positions: jax.Array,
    is_forced: jax.Array | None,
) -> tuple[jax.Array, jax.Array | float]:
    """The number of accepted drafts, i32[B], and `log_prefix` for `token_after`."""
    rows = processed[:, :-1]
    ids = jnp.clip(drafts, 0, rows.shape[-1] - 1)
    is_possible = drafts >= 0
    norm = log_sum_exp(rows)
    log_ratio = _at(rows, ids) - norm
    if draft_logits is not None:
        draft_norm = log_sum_exp(draft_logits)
        draft_ids = ids if draft_vocab is None else draft_vocab.draft_ids[ids]
        is_possible &= draft_ids >= 0
        log_ratio -= _at(draft_logits, jnp.maximum(draft_ids, 0)) - draft_norm
    log_ratio = jnp.where(is_possible, log_ratio, -jnp.inf)
    if is_forced is not None:
        log_ratio = jnp.where(is_forced, 0.0, log_ratio)
    keys = random.row_keys(sampling.seed, positions[:, 0], Purpose.ACCEPT)
    # log u is compared with log p - log q, because log u + log q can round up and reject although p equals q.
    log_u = row_log(random.uniform(keys, drafts.shape[1]))
    greedy = count_leading(argmax(rows) == drafts, draft_count)
    is_sampled = sampling.temperature > 0
    if draft_logits is None:
        accepted = count_leading(log_u < log_ratio, draft_count)
        return jnp.where(is_sampled, accepted, greedy), 0.0
    log_prefix = log_prefixes(log_ratio)
    log_chance = log_acceptance(
        log_prefix, draft_count, rows, norm, draft_logits, draft_norm, draft_vocab, is_forced
    )
    accepted = jnp.where(is_sampled, _count_through_last(log_u < log_chance, draft_count), greedy)
    return accepted, row_at(log_prefix, accepted)[:, None]


def _at(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """logits [B, K, V] at ids i32[B, K], as [B, K]."""
    return jnp.take_along_axis(logits, ids[..., None], axis=-1, mode="promise_in_bounds")[..., 0]


def _log_proposal(draft_logits: jax.Array, draft_vocab: DraftVocabulary | None) -> jax.Array:
    """log q over the target vocabulary, f32[B, V], from one row of draft logits f32[B, Vd]."""
    log_q = draft_logits - log_sum_exp(draft_logits)[..., None]
    if draft_vocab is None:
        return log_q
    ids = jnp.maximum(draft_vocab.draft_ids, 0)
    known = log_q.at[:, ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(draft_vocab.draft_ids >= 0, known, -jnp.inf)


def _log_residual(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """log max(p - q, 0); -inf also where both are -inf and where either is NaN."""
    below = log_q < log_p
    gap = jnp.where(below, log_q - log_p, -1.0)
    return jnp.where(below, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
