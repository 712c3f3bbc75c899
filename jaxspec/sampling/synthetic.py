"""Synthetic acceptance: a benchmark mode that accepts drafts at a given rate, right or wrong.

Its output does not have the target's distribution. It makes engines comparable without a trained drafter.
"""

import math

import jax
import jax.numpy as jnp
from jaxspec_kernels import random
from jaxspec_kernels.argmax import argmax
from jaxspec_kernels.random import Purpose

from jaxspec.sampling.logits import process_logits
from jaxspec.sampling.mode import SamplingMode
from jaxspec.sampling.rejection import Verdict, count_leading, row_at, token_after
from jaxspec.sampling.state import SamplingState
from jaxspec.sampling.vocabulary import DraftVocabulary
from jaxspec.sharding import split_over


def verify_synthetic(
    logits: jax.Array,
    drafts: jax.Array,
    draft_count: jax.Array,
    draft_logits: jax.Array | None,
    draft_vocab: DraftVocabulary | None,
    sampling: SamplingState,
    positions: jax.Array,
    *,
    mode: SamplingMode,
    mean_acceptance_length: float,
    vocab_size: int | None = None,
) -> Verdict:
    """`verify` with acceptance at a given rate instead of by the drafts' probabilities.

    Args:
      mean_acceptance_length: mean tokens per step, from 1 to K + 1, including the token after the drafts
        (vLLM's `synthetic_acceptance_length`). With floor L and fraction f, the first L - 1 drafts are
        always accepted, the next one with probability f, and later ones never.

    The other arguments and the result are those of `verify`.

    Raises:
      ValueError: the mean acceptance length is out of range.
    """
    accepts = (drafts >= 0) & _accepts_by_rate(
        acceptance_rates(mean_acceptance_length, drafts.shape[1]), sampling, positions
    )
    accepted = count_leading(accepts, draft_count)
    if mode == SamplingMode.GREEDY:
        best = argmax(logits, split_over(logits.shape[-1], vocab_size or logits.shape[-1]))
        return Verdict(accepted, row_at(best, accepted), logits)
    processed = process_logits(logits, sampling, mode=mode)
    token = token_after(
        processed, accepted, 0.0, drafts, draft_count, draft_logits, draft_vocab, sampling, positions
    )
    return Verdict(accepted, token, processed)


def acceptance_rates(mean_acceptance_length: float, drafts: int) -> list[float]:
    """The acceptance probability of each draft, given that those before it were accepted.

    Raises:
      ValueError: the mean acceptance length is out of range.
    """
    if not 1 <= mean_acceptance_length <= drafts + 1:
        raise ValueError(
            f"mean_acceptance_length must lie between 1 and {drafts + 1} with {drafts} drafts, "
            f"got {mean_acceptance_length!r}"
        )
    whole = math.floor(mean_acceptance_length) - 1
    fraction = mean_acceptance_length - 1 - whole
    return [1.0 if i < whole else fraction if i == whole else 0.0 for i in range(drafts)]


def _accepts_by_rate(rates: list[float], sampling: SamplingState, positions: jax.Array) -> jax.Array:
    keys = random.row_keys(sampling.seed, positions[:, :-1], Purpose.ACCEPT)
    return random.uniform(keys, 1)[..., 0] < jnp.asarray(rates, jnp.float32)
