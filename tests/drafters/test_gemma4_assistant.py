"""Gemma 4's assistants against transformers' generator of candidates, and those that do not fit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import ASSISTANT_TARGETS, assert_close, golden_checkpoint, golden_folder
from golden_heads import ROWS, GoldenHead

from jaxspec.config import ConfigError
from jaxspec.drafters.formats import drafter_keys
from jaxspec.drafters.kinds.gemma4_assistant import Gemma4AssistantConfig
from jaxspec.models.target import target_config
from jaxspec.sampling import SamplingMode
from jaxspec.weights.memory import ArrayTensor

SHORT = 5


@nnx.jit(static_argnames="num_drafts")
def propose(drafter, target, context, num_drafts):
    mode = SamplingMode.TEMPERATURE
    proposal, _ = drafter.propose(target, context, (), num_drafts=num_drafts, mode=mode)
    return proposal


def proposal_of(case, length=ROWS, num_drafts=7):
    """What is drafted after so many positions; the pages hold `ROWS`, also where these are more."""
    history = np.zeros((2, 64), np.int32)
    history[0, 1 : ROWS + 1] = case.next_tokens
    context = case.context(case.hidden[0], history=jnp.asarray(history))
    state = case.hidden[0][length - 1]
    context = replace(
        context,
        hidden=jnp.stack([state, jnp.full_like(state, 9.0)]),
        length=jnp.array([length, 0]),
        target_caches=tuple(case.paged.cache[i] for i in case.drafter.needs.target_caches),
    )
    return propose(case.drafter, case.target, context, num_drafts)


def assert_equals_golden(proposal, golden):
    """`golden` [1, K, V]: in a golden with clusters, tokens of others are one less than the least logit."""
    logits, count = np.asarray(proposal.logits[0]), proposal.tokens.shape[1]
    golden = golden[0, :count]
    np.testing.assert_array_equal(proposal.tokens[0], golden.argmax(-1))
    scored = np.isfinite(logits)
    if not scored.all():
        np.testing.assert_array_equal(scored, golden > golden.min(-1, keepdims=True))
        assert scored.sum() == 24 * count
    assert_close(np.where(scored, logits, 0), np.where(scored, golden, 0))
    assert proposal.count.tolist() == [count, 0]


@pytest.fixture(scope="module", params=ASSISTANT_TARGETS)
def case(request):
    return GoldenHead(request.param, 7)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5, 6, 7])
def test_drafts_are_those_of_transformers(case, num_drafts):
    assert_equals_golden(proposal_of(case, num_drafts=num_drafts), case.golden["draft_logits"])


def test_what_lies_past_the_last_token_is_not_seen(case):
    """As it is what rejected drafts left."""
    assert_equals_golden(proposal_of(case, SHORT), case.golden["short_draft_logits"])


def test_its_folder_is_enough():
    folder = str(golden_folder("gemma4-assistant"))
    assert drafter_keys(folder) == {
        "kind": "gemma4_assistant",
        "source": folder,
        "file": None,
        "sha256": None,
    }


@pytest.mark.parametrize(
    ("target", "change", "own", "message"),
    [
        ("llama-tied", {}, {}, "is for targets of gemma4_text, this one is 'llama'"),
        (
            "gemma4",
            {},
            {},
            "layer 1 has num_key_value_heads 1, the target's layer 3, whose cache it reads, has 2",
        ),
        ("gemma4-moe", {"backbone_hidden_size": 48}, {}, "for targets of hidden size 48, this one has 32"),
        ("gemma4-moe", {"tie_word_embeddings": False}, {}, "tie_word_embeddings False is not supported"),
        ("gemma4-moe", {"num_centroids": 7}, {}, "num_centroids 7 does not divide vocab_size 96"),
        ("gemma4-moe", {"centroid_intermediate_top_k": 13}, {}, "13 is more than num_centroids 12"),
        ("gemma4-moe", {}, {"vocab_size": 64}, "the assistant has vocab_size 64, the target 96"),
        ("gemma4-moe", {}, {"head_dim": 16}, "layer 0 has head_dim 16, the target's layer 1, whose cache"),
        ("gemma4-moe", {}, {"enable_moe_block": True}, "enable_moe_block True is not supported"),
        ("gemma4-moe", {}, {"model_type": "gemma4_unified_text"}, "'gemma4_unified_text' is not supported"),
    ],
)
def test_assistants_that_do_not_fit_are_refused(target, change, own, message):
    checkpoint = golden_checkpoint("gemma4-assistant-clusters")
    config = {**checkpoint.config, **change}
    config["text_config"] = {**config["text_config"], **own}
    with pytest.raises(ConfigError, match=message):
        Gemma4AssistantConfig.from_hf(config, checkpoint.tensors, target_config(golden_checkpoint(target)))


def test_clusters_that_lack_a_token_are_refused():
    """As those of an assistant that was never trained, which are zeros."""
    checkpoint = golden_checkpoint("gemma4-assistant-clusters")
    name = "masked_embedding.token_ordering"
    tensors = {**checkpoint.tensors, name: ArrayTensor(np.zeros(96, np.int64))}
    with pytest.raises(ConfigError, match=f"{name} must hold each token once"):
        Gemma4AssistantConfig.from_hf(
            checkpoint.config, tensors, target_config(golden_checkpoint("gemma4-moe"))
        )


def test_heads_that_cannot_be_split_like_the_targets_are_refused():
    """Four devices have two copies of each key/value head if there are four queries to a pair of them."""
    target = target_config(golden_checkpoint("gemma4"))
    checkpoint = golden_checkpoint("gemma4-assistant")
    config = Gemma4AssistantConfig.from_hf(checkpoint.config, checkpoint.tensors, target)
    assert config.over(4).layers.kv_copies == 2
    few = replace(config, layers=replace(config.layers, num_attention_heads=2))
    with pytest.raises(
        ConfigError, match="the assistant's 2 heads cannot be split over 4 devices like the target's 4"
    ):
        few.over(4)
