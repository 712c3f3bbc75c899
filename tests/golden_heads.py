"""Runs golden heads on the rows that they were made with, fed as the programs feed them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_files import DRAFTER_KINDS, DRAFTER_TARGETS, golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget

from jaxspec.attention import RowBlock, join_rows
from jaxspec.config import DrafterConfig
from jaxspec.drafters.base import Context, Rows
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.models.target import load_target
from jaxspec.sampling import SamplingMode, SamplingState

ROWS, PAGE, CHUNK = 24, 8, 16


def two_slots(row, fill):
    """Puts the golden's row in slot 0; slot 1 is idle."""
    row = jnp.asarray(row)
    return jnp.stack([row, jnp.full_like(row, fill)])


class GoldenHead:
    """A golden head on its target, which has read the golden's rows; slot 1 is idle, with poisoned pages.

    In both slots, the target's pages end after `length` positions.
    """

    def __init__(self, name, num_drafts, *, length=48, page_size=PAGE, **config):
        self.golden = golden_outputs(name)
        self.target = load_target(golden_checkpoint(DRAFTER_TARGETS[name]), dtype=jnp.float32)
        self.drafter = load_drafter(
            DrafterConfig(
                DRAFTER_KINDS[name],
                num_speculative_tokens=num_drafts,
                **{"source": str(golden_folder(name)), **config},
            ),
            self.target,
            Build(jnp.dtype(jnp.float32)),
        )
        prompt = golden_outputs(DRAFTER_TARGETS[name])["input_ids"][0].astype(np.int32)
        self.paged = PagedTarget(
            self.target,
            2,
            length,
            page_size=page_size,
            width=ROWS,
            capture=self.drafter.needs.capture,
            fill=np.nan,
        )
        _, self.hidden, self.captured = self.paged.feed([prompt[:ROWS], []], [0, 0])
        self.tokens, self.next_tokens = prompt[:ROWS], prompt[1 : ROWS + 1]
        np.testing.assert_array_equal(self.next_tokens, self.golden["token_ids"][0])

    def rows(self, start, stop, width):
        """Rows start to stop - 1 of slot 0, padded to `width` with invalid rows of junk."""

        def cut(x, fill):
            x = jnp.asarray(x)[start:stop]
            padded = jnp.pad(x, [(0, width - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
            return join_rows([two_slots(padded, fill)])

        block = RowBlock(
            positions=jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (2, width)),
            valid=two_slots(jnp.arange(width) < stop - start, False),
            page_table=self.paged.page_table,
        )
        return Rows(
            tokens=cut(self.tokens, 7),
            next_tokens=cut(self.next_tokens, 7),
            hidden=cut(self.hidden[0], 9.0),
            captured=tuple(cut(x[0], 9.0) for x in self.captured),
            blocks=(block,),
        )

    def context(self, states, *, history=None):
        """The context in which slot 0 has committed the golden's rows and decodes greedily; slot 1 is idle.

        `states` are those of the last call of `refresh`, whose rows began at 0 or after whole blocks.
        """
        return Context(
            hidden=two_slots(states[(ROWS - 1) % (len(states) // 2)], 9.0),
            history=jnp.zeros((2, 64), jnp.int32) if history is None else history,
            length=jnp.array([ROWS, 0]),
            active=jnp.array([True, False]),
            page_table=self.paged.page_table,
            sampling=SamplingState(
                temperature=jnp.zeros(2),
                top_k=jnp.zeros(2, jnp.int32),
                top_p=jnp.ones(2),
                min_p=jnp.zeros(2),
                seed=jnp.zeros((2, 2), jnp.uint32),
            ),
        )


@nnx.jit
def _refresh(drafter, target, rows, cache):
    return drafter.refresh(target, rows, cache)


@nnx.jit(static_argnames="mode")
def propose(drafter, target, context, cache, mode=SamplingMode.TEMPERATURE):
    num_drafts = drafter.num_speculative_tokens
    return drafter.propose(target, context, cache, num_drafts=num_drafts, mode=mode)


def proposal_of(name, num_drafts, *, temperature=0.0, mode=SamplingMode.TEMPERATURE, **options):
    """What a head of one pass proposes, and its golden; over poison, of which nothing may be seen.

    Proposed behind the golden's rows, which come in two chunks, the second one padded.
    """
    case = GoldenHead(name, num_drafts, **options)
    models = (case.drafter, case.target)
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    for begin, end in ((0, CHUNK), (CHUNK, ROWS)):
        hidden, cache = _refresh(*models, case.rows(begin, end, CHUNK), cache)
    assert hidden.shape == (2 * CHUNK, 0)
    history = jnp.zeros((2, 64), jnp.int32).at[0, ROWS].set(int(case.golden["token_ids"][0, -1]))
    context = case.context(hidden, history=history)
    sampling = replace(context.sampling, temperature=jnp.full(2, temperature))
    proposal, _ = propose(*models, replace(context, sampling=sampling), cache, mode=mode)
    return proposal, case.golden
