"""DSpark heads against the goldens, the logits that sampled drafts come with, and heads that do not fit."""

import jax
import numpy as np
import pytest
from golden_files import DSPARK_TARGETS, assert_close, golden_checkpoint, golden_outputs
from golden_heads import proposal_of

from jaxspec.config import ConfigError
from jaxspec.drafters.kinds.dspark import DSparkConfig
from jaxspec.models.target import target_config
from jaxspec.sampling import SamplingMode


@pytest.mark.parametrize("name", DSPARK_TARGETS)
@pytest.mark.parametrize("mode", [SamplingMode.TEMPERATURE, SamplingMode.GREEDY])
def test_all_drafts_of_one_block(name, mode):
    drafts = golden_outputs(name)["draft_tokens"].shape[1]
    proposal, golden = proposal_of(name, drafts, mode=mode)
    np.testing.assert_array_equal(proposal.tokens[:1], golden["draft_tokens"])
    assert proposal.count.tolist() == [drafts, 0]
    assert_close(proposal.confidence[:1], golden["confidence"])
    if mode == SamplingMode.GREEDY:
        assert proposal.logits is None
    else:
        assert_close(proposal.logits[:1], golden["draft_logits"])


@pytest.mark.parametrize("name", ["dspark-rnn", "dspark-speculators-masks"])
def test_a_block_shorter_than_the_largest(name):
    proposal, golden = proposal_of(name, golden_outputs(name)["short_logits"].shape[1])
    assert_close(proposal.logits[:1], golden["short_logits"])


@pytest.mark.parametrize("name", ["dspark", "dspark-speculators"])
def test_drafts_are_drawn_from_the_logits_behind_the_draft_before(name):
    """And the logits that come with them are those, divided by the temperature."""
    temperature = 3.0
    proposal, golden = proposal_of(name, 8, temperature=temperature)
    tensors = {key: tensor.read() for key, tensor in golden_checkpoint(name).tensors.items()}
    drawn, greedy = proposal.tokens[0], golden["draft_tokens"][0]
    assert (np.asarray(drawn) != greedy).any()
    first, table = golden["token_ids"][0, -1], tensors["markov_head.markov_w1.weight"]

    def added(tokens):
        before = np.concatenate([[first], tokens[:-1]])
        return table[before] @ tensors["markov_head.markov_w2.weight"].T

    expected = golden["draft_logits"][0] - added(greedy) + added(drawn)
    assert_close(proposal.logits[0], expected / temperature)
    offsets = tensors.get("d2t", np.zeros(proposal.logits.shape[-1], int))
    ids = {int(i + offset): i for i, offset in enumerate(offsets)}
    shares = jax.nn.softmax(proposal.logits[0], axis=-1)
    assert min(float(shares[k, ids[int(token)]]) for k, token in enumerate(drawn)) > 1e-4


@pytest.fixture
def read():
    """The meaning of a golden's config on its target, with changes to it (None takes a key away)."""
    target = target_config(golden_checkpoint("llama-tied"))

    def read(name, *, without=(), **changes):
        checkpoint = golden_checkpoint(name)
        config = {**checkpoint.config, **changes}
        if nested := config.get("dflash_config"):
            config["dflash_config"] = {**nested, **changes}
        tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.startswith(without)}
        config = {key: value for key, value in config.items() if value is not None}
        return DSparkConfig.from_hf(config, tensors, target)

    return read


def test_which_rows_draft(read):
    assert all(read(name).anchor_drafts for name in DSPARK_TARGETS if name != "dspark-speculators-masks")
    assert not read("dspark-gated", sample_from_anchor=False).anchor_drafts
    masks = read("dspark-speculators", sample_from_anchor=None)
    assert (masks.anchor_drafts, masks.most_drafts) == (False, 7)


def test_a_head_may_have_one_of_the_two(read):
    alone = read("dspark", without=("confidence_head.",))
    assert (alone.markov_rank, alone.has_confidence, alone.confidence_head_with_markov) == (8, False, False)
    config = read("dspark-rnn", markov_rank=0)
    assert (config.markov_rank, config.has_confidence) == (0, True)


def test_what_speculators_leaves_out_is_its_class_default(read):
    bare = read(
        "dspark-speculators", markov_rank=None, markov_head_type=None, confidence_head_with_markov=None
    )
    assert (bare.markov_rank, bare.markov_head_type, bare.confidence_head_with_markov) == (
        256,
        "vanilla",
        True,
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "dspark",
            {"markov_head_type": "lstm"},
            "markov_head_type 'lstm' is not supported; supported: vanilla",
        ),
        ("dspark-rnn", {"sample_from_anchor": False}, "'rnn' is not supported without sample_from_anchor"),
        ("dspark", {"markov_rank": 0}, "confidence_head_with_markov is true, but there is no markov_rank"),
        ("dspark", {"output_multiplier": 0.5}, "output_multiplier 0.5 is not supported"),
        ("dspark", {"final_logit_softcapping": 30.0}, "is not supported beside a Markov head"),
    ],
)
def test_heads_that_do_not_fit_are_refused(read, name, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(name, **changes)
    assert "\n" not in str(error.value)
