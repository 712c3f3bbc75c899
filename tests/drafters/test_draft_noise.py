"""Which noise drafts are drawn with: every draft of every step has its own."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.attention import PageTable
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Context
from jaxspec.drafters.one_pass import OnePassDrafter
from jaxspec.sampling import SamplingMode, SamplingState

SLOTS, DRAFTS, VOCABULARY = 3, 4, 100_000


class FlatLoop(AutoregressiveDrafter):
    """Drafts one token from the one before, all tokens being equally likely."""

    draft_vocab_size = VOCABULARY
    refresh = advance = None  # not called

    def __init__(self):
        super().__init__(num_speculative_tokens=DRAFTS)
        self.target_ids, self.draft_ids = nnx.data(None), nnx.data(None)

    def run(self, target, tokens, hidden, blocks, cache):
        return hidden, cache

    def logits(self, target, hidden):
        return jnp.zeros((SLOTS, VOCABULARY))


class FlatBlock(OnePassDrafter):
    """The same in one pass."""

    draft_vocab_size = VOCABULARY
    refresh = None  # not called

    def __init__(self):
        super().__init__(num_speculative_tokens=DRAFTS)

    def block_logits(self, target, context, cache, *, num_drafts):
        return jnp.zeros((SLOTS, DRAFTS, VOCABULARY)), cache


def drafts_of(drafter, length):
    """The drafts of a step whose slots' last tokens are at `length`, [SLOTS, DRAFTS]."""
    ones = jnp.ones(SLOTS)
    sampling = SamplingState(
        temperature=ones,
        top_k=jnp.zeros(SLOTS, jnp.int32),
        top_p=ones,
        min_p=jnp.zeros(SLOTS),
        seed=jnp.arange(2 * SLOTS, dtype=jnp.uint32).reshape(SLOTS, 2),
    )
    context = Context(
        hidden=jnp.zeros((SLOTS, 1)),
        history=jnp.zeros((SLOTS, 100), jnp.int32),
        length=jnp.full(SLOTS, length, jnp.int32),
        active=jnp.ones(SLOTS, bool),
        page_table=PageTable(jnp.zeros((SLOTS, 1), jnp.int32), 16),
        sampling=sampling,
    )
    proposal, _ = drafter.propose(None, context, (), num_drafts=DRAFTS, mode=SamplingMode.TEMPERATURE)
    return np.asarray(proposal.tokens)


@pytest.mark.parametrize("drafter", [FlatLoop, FlatBlock])
def test_the_next_step_draws_otherwise_at_the_same_positions(drafter):
    steps = [drafts_of(drafter(), length) for length in (40, 41, 42, 43)]
    assert len(np.unique(steps)) == SLOTS * DRAFTS * len(steps)


def test_one_pass_draws_as_the_loop_does():
    np.testing.assert_array_equal(drafts_of(FlatLoop(), 40), drafts_of(FlatBlock(), 40))
