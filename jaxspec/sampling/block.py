"""Accepting drafts as a block: the longest prefix that is kept, though a shorter one may not have been.

Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, algorithm 2. A prefix of i
drafts has p_i = min(p_(i-1) P(d_i) / q(d_i), 1) from p_0 = 1, P being the target's and q the drafter's.
"""

import jax
import jax.numpy as jnp

from jaxspec.sampling.vocabulary import DraftVocabulary


def log_prefixes(log_ratio: jax.Array) -> jax.Array:
    """log p_0 to log p_K, f32[B, K + 1], of log P(d_i) - log q(d_i), f32[B, K]."""
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
) -> jax.Array:
    """log of the chance that each prefix is accepted where no longer one is, f32[B, K].

    The whole block's is p. A shorter prefix's is Z / (Z + 1 - p), where Z = sum(max(p P - q, 0)) is what the
    target P of the row after the prefix asks for beyond what that row's draft, drawn from q, gives.

    Args:
      log_prefix: f32[B, K + 1], of `log_prefixes`.
      draft_count: i32[B], length of the block.
      rows, norm: P as logits f32[B, K, V] and their logsumexp.
      draft_logits, draft_norm: q as logits f32[B, K, Vd] and their logsumexp.
      draft_vocab: None where the vocabularies are one.
    """
    num_drafts = draft_logits.shape[1]
    log_p = log_prefix[:, 1:]
    rows = rows[:, 1:]
    if draft_vocab is not None:
        rows = jnp.take(rows, draft_vocab.target_ids, axis=-1, mode="clip")
    # Z is p - sum(min(p P, q)), for P sums to 1: over the draft vocabulary, which may be much the smaller.
    asked = rows + (log_p[:, :-1] - norm[:, 1:])[..., None]
    given = draft_logits[:, 1:] - draft_norm[:, 1:, None]
    p = jnp.exp(log_p[:, :-1])
    beyond = jnp.maximum(p - jnp.exp(jnp.minimum(asked, given)).sum(axis=-1), 0.0)
    total = beyond + (1.0 - p)
    # 0 of 0: p is 1 and P equals q, so the next draft is accepted in any case.
    shorter = jnp.where(total == 0, 0.0, jnp.log(beyond) - jnp.log(total))
    is_whole = jnp.arange(1, num_drafts + 1) == draft_count[:, None]
    return jnp.where(is_whole, log_p, jnp.pad(shorter, ((0, 0), (0, 1))))
