"""Block verification: accepts the longest prefix of the drafts that passes, even if a shorter one does not.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, algorithm 2. With the
target's distribution P and the drafter's q, p_0 = 1 and p_i = min(p_(i-1) P(d_i) / q(d_i), 1). Row by row, a
draft with P / q = 1/2 would be rejected half of the time, even if P / q = 2 for the next one, so that both
together are as likely as under the target.
"""

import jax
import jax.numpy as jnp
from jaxspec_kernels.row_sum import row_sum

from jaxspec.sampling.vocabulary import DraftVocabulary


def log_prefixes(log_ratio: jax.Array) -> jax.Array:
    """log p_0 to log p_K, f32[B, K + 1], from log P(d_i) - log q(d_i), f32[B, K]."""
    prefixes = [jnp.zeros_like(log_ratio[:, 0])]
    for i in range(log_ratio.shape[1]):
        prefixes.append(jnp.minimum(prefixes[-1] + log_ratio[:, i], 0.0))
    return jnp.stack(prefixes, axis=1)


def log_acceptance(
    log_prefix: jax.Array,
    draft_count: jax.Array,
    rows: jax.Array,
    norm: jax.Array,
    draft_logits: jax.Array,
    draft_norm: jax.Array,
    draft_vocab: DraftVocabulary | None,
    is_forced: jax.Array | None = None,
) -> jax.Array:
    """log of the probability that the prefix of each length is accepted if no longer one is, f32[B, K].

    Column i is for the prefix of i + 1 drafts. For the whole block the probability is p. For a shorter
    prefix it is Z / (Z + 1 - p) with Z = sum(max(p P - q, 0)), where P and q are the distributions of the row
    after the prefix.

    Args:
      log_prefix: f32[B, K + 1], from `log_prefixes`.
      draft_count: i32[B], length of the block.
      rows, norm: P as logits f32[B, K, V], and their logsumexp f32[B, K].
      draft_logits, draft_norm: q as logits f32[B, K, Vd], and their logsumexp f32[B, K].
      draft_vocab: maps the draft vocabulary to the target's; None if they are the same.
      is_forced: bool[B, K], drafts at which P and q allow nothing else, whatever `draft_logits` say; None for
        none.
    """
    num_drafts = draft_logits.shape[1]
    log_p = log_prefix[:, 1:]
    rows = rows[:, 1:]
    if draft_vocab is not None:
        rows = jnp.take(rows, draft_vocab.target_ids, axis=-1, mode="clip")
    # Z = p - sum(min(p P, q)), because P sums to 1. This sum runs only over the draft vocabulary.
    asked = rows + (log_p[:, :-1] - norm[:, 1:])[..., None]
    given = draft_logits[:, 1:] - draft_norm[:, 1:, None]
    p = jnp.exp(log_p[:, :-1])
    beyond = jnp.maximum(p - row_sum(jnp.exp(jnp.minimum(asked, given))), 0.0)
    if is_forced is not None:
        beyond = jnp.where(is_forced[:, 1:], 0.0, beyond)  # as p is at most 1
    total = beyond + (1.0 - p)
    # total is 0 only if p is 1 and P equals q. Then the next draft is accepted anyway.
    shorter = jnp.where(total == 0, 0.0, jnp.log(beyond) - jnp.log(total))
    is_whole = jnp.arange(1, num_drafts + 1) == draft_count[:, None]
    return jnp.where(is_whole, log_p, jnp.pad(shorter, ((0, 0), (0, 1))))
