"""EAGLE heads against the goldens: every row, and four drafts through refresh, start and step."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import (
    EAGLE1_TARGETS,
    HEAD_TARGETS,
    assert_close,
    golden_checkpoint,
    golden_folder,
    golden_outputs,
)
from paged_rows import PagedTarget

from jaxspec.config import DrafterConfig
from jaxspec.drafters.base import Context, Rows
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.models.loading import load_target
from jaxspec.sampling import SamplingState

ROWS, CHUNK, PAGE, DRAFTS = 24, 16, 8, 4


@nnx.jit
def every_row(drafter, target, rows, cache):
    """(logits, hidden, cache) of one pass over all rows."""
    features = drafter.fuse(rows.hidden, rows.captured) if hasattr(drafter, "fuse") else rows.hidden
    hidden, cache = drafter.run(
        target, rows.next_tokens, features, rows.positions, rows.valid, cache, rows.page_table
    )
    return drafter.logits(target, hidden), hidden, cache


@nnx.jit
def refresh(drafter, target, rows, cache):
    return drafter.refresh(target, rows, cache)


@nnx.jit
def start(drafter, target, context, cache):
    return drafter.start(target, context, cache, stochastic=True)


@nnx.jit
def step(drafter, target, context, state, i):
    return drafter.step(target, context, state, i)


def two_slots(row, fill):
    """The golden's row in slot 0; slot 1 is idle."""
    row = jnp.asarray(row)
    return jnp.stack([row, jnp.full_like(row, fill)])


class Case:
    """A golden head on its target, which has run over the golden's rows; slot 1 idles over poison."""

    def __init__(self, name, **config):
        kind = "eagle1" if name in EAGLE1_TARGETS else "eagle3"
        self.golden = golden_outputs(name)
        self.target = load_target(golden_checkpoint(HEAD_TARGETS[name]), dtype=jnp.float32)
        self.drafter = load_drafter(
            DrafterConfig(kind, num_speculative_tokens=DRAFTS, source=str(golden_folder(name)), **config),
            self.target,
            Build(PAGE, jnp.dtype(jnp.float32)),
        )
        prompt = golden_outputs(HEAD_TARGETS[name])["input_ids"][0].astype(np.int32)
        self.paged = PagedTarget(
            self.target, 2, 48, page_size=PAGE, width=ROWS, capture=self.drafter.capture, fill=np.nan
        )
        _, self.hidden, self.captured = self.paged.feed([prompt[:ROWS], []], [0, 0])
        self.tokens, self.next_tokens = prompt[:ROWS], prompt[1 : ROWS + 1]
        np.testing.assert_array_equal(self.next_tokens, self.golden["token_ids"][0])

    def rows(self, start, stop, width):
        """Rows start … stop-1 of slot 0, padded to `width` with junk that is not valid."""

        def cut(x, fill):
            x = jnp.asarray(x)[start:stop]
            return two_slots(
                jnp.pad(x, [(0, width - len(x))] + [(0, 0)] * (x.ndim - 1), constant_values=fill), fill
            )

        return Rows(
            tokens=cut(self.tokens, 7),
            next_tokens=cut(self.next_tokens, 7),
            positions=jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (2, width)),
            valid=two_slots(jnp.arange(width) < stop - start, False),
            last_row=jnp.array([stop - start - 1, 0]),
            hidden=cut(self.hidden[0], 9.0),
            captured=tuple(cut(x[0], 9.0) for x in self.captured),
            page_table=self.paged.page_table,
        )


@pytest.fixture(scope="module", params=HEAD_TARGETS)
def case(request):
    return Case(request.param)


def test_features_are_the_hidden_states_that_the_head_was_made_for(case):
    features = jnp.concatenate(case.captured, axis=-1)[:1] if case.captured else case.hidden[:1]
    assert_close(features, case.golden["features"])


def test_logits_and_hidden_of_every_row(case):
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    logits, hidden, _ = every_row(case.drafter, case.target, case.rows(0, ROWS, ROWS), cache)
    assert_close(logits[:1], case.golden["logits"])
    assert_close(hidden[:1], case.golden["hidden"])


def test_drafts_through_refresh_start_and_step(case):
    """The rows come in two chunks, the second one padded; the request is greedy, the program samples."""
    models = (case.drafter, case.target)
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    for begin, end in ((0, CHUNK), (CHUNK, ROWS)):
        hidden, cache = refresh(*models, case.rows(begin, end, CHUNK), cache)
    context = Context(
        hidden=hidden,
        history=jnp.zeros((2, 64), jnp.int32),  # EAGLE does not read it
        length=jnp.array([ROWS, 0]),
        active=jnp.array([True, False]),
        page_table=case.paged.page_table,
        sampling=SamplingState(
            temperature=jnp.zeros(2),
            top_k=jnp.zeros(2, jnp.int32),
            top_p=jnp.ones(2),
            min_p=jnp.zeros(2),
            seed=jnp.zeros((2, 2), jnp.uint32),
        ),
    )
    state = start(*models, context, cache)
    hiddens = [state.hidden]
    for i in range(1, DRAFTS):
        state = step(*models, context, state, jnp.int32(i))
        hiddens.append(state.hidden)
    proposal = case.drafter.finish(context, state)
    np.testing.assert_array_equal(proposal.tokens[:1], case.golden["draft_tokens"])
    assert_close(proposal.logits[:1], case.golden["draft_logits"])
    assert_close(jnp.stack(hiddens, axis=1)[:1], case.golden["draft_hidden"])
    assert proposal.count.tolist() == [DRAFTS, 0]
