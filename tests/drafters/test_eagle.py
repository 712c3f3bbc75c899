"""EAGLE heads and MTP layers against the goldens: every row, and four drafts by refresh, start and step."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import EAGLE1_TARGETS, EAGLE3_TARGETS, MTP_TARGETS, assert_close, golden_checkpoint
from golden_heads import ROWS, GoldenHead
from tiny_models import write_folder

from jaxspec.sampling import SamplingMode

CHUNK, DRAFTS = 16, 4


@nnx.jit
def every_row(drafter, target, rows, cache):
    """(logits, hidden, cache) of one pass over all rows."""
    features = drafter.fuse(rows.hidden, rows.captured) if hasattr(drafter, "fuse") else rows.hidden
    hidden, cache = drafter.run(target, rows.next_tokens, features, rows.blocks, cache)
    return drafter.logits(target, hidden), hidden, cache


@nnx.jit
def refresh(drafter, target, rows, cache):
    return drafter.refresh(target, rows, cache)


@nnx.jit
def start(drafter, target, context, cache):
    num_drafts = drafter.num_speculative_tokens
    return drafter.start(target, context, cache, num_drafts=num_drafts, mode=SamplingMode.TEMPERATURE)


@nnx.jit
def step(drafter, target, context, state, i):
    return drafter.step(target, context, state, i)


FLAT = "eagle3-norm-output, flat"
"""The golden of EAGLE-3.1 as others than speculators write such a head."""


def write_flat(folder):
    checkpoint = golden_checkpoint("eagle3-norm-output")
    config = {**checkpoint.config, "architectures": ["LlamaForCausalLMEagle3"]}
    config = {**config.pop("transformer_layer_config"), **config}
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor.read() for name, tensor in checkpoint.tensors.items()
    }
    stated = {key: value for key, value in config.items() if not key.startswith("speculators_")}
    return write_folder(folder, stated, tensors)


@pytest.fixture(scope="module", params=[*EAGLE3_TARGETS, FLAT, *EAGLE1_TARGETS, *MTP_TARGETS])
def case(request, tmp_path_factory):
    if request.param != FLAT:
        return GoldenHead(request.param, DRAFTS)
    folder = write_flat(tmp_path_factory.mktemp("head") / "flat")
    return GoldenHead("eagle3-norm-output", DRAFTS, source=str(folder))


def test_features_are_the_hidden_states_that_the_head_was_made_for(case):
    features = jnp.concatenate(case.captured, axis=-1)[:1] if case.captured else case.hidden[:1]
    assert_close(features, case.golden["features"])


def test_logits_and_hidden_of_every_row(case):
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    logits, hidden, _ = every_row(case.drafter, case.target, case.rows(0, ROWS, ROWS), cache)
    assert_close(logits[:ROWS], case.golden["logits"][0])
    assert_close(hidden[:ROWS], case.golden["hidden"][0])


def test_drafts_through_refresh_start_and_step(case):
    """The rows come in two chunks, the second one padded; the request is greedy, the program samples."""
    models = (case.drafter, case.target)
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    for begin, end in ((0, CHUNK), (CHUNK, ROWS)):
        hidden, cache = refresh(*models, case.rows(begin, end, CHUNK), cache)
    context = case.context(hidden)
    state = start(*models, context, cache)
    hiddens = [state.hidden]
    for i in range(1, DRAFTS):
        state = step(*models, context, state, jnp.int32(i))
        hiddens.append(state.hidden)
    proposal, _ = case.drafter.finish(context, state)
    np.testing.assert_array_equal(proposal.tokens[:1], case.golden["draft_tokens"])
    assert_close(proposal.logits[:1], case.golden["draft_logits"])
    assert_close(jnp.stack(hiddens, axis=1)[:1], case.golden["draft_hidden"])
    assert proposal.count.tolist() == [DRAFTS, 0]
