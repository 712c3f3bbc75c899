"""DFlash heads against the goldens, at the end of their pages, and those that do not fit."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import DFLASH_TARGETS, assert_close, golden_checkpoint, golden_folder, golden_outputs
from golden_heads import ROWS, GoldenHead, proposal_of, propose
from paged_rows import PagedTarget
from safetensors.numpy import load_file
from tiny_models import write_dflash, write_folder

from jaxspec.attention import FullAttention, PageTable, RowBlock, SlidingWindow, build_metadata
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.kinds.dflash import DFlashConfig, block_metadata
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.models.target import load_target, target_config

DRAFTS, SHORT = 7, 3


@pytest.mark.parametrize("name", DFLASH_TARGETS)
def test_all_drafts_of_one_block(name):
    drafts = golden_outputs(name)["draft_tokens"].shape[1]
    assert drafts == DRAFTS + (name == "dflash-anchor")
    proposal, golden = proposal_of(name, drafts)
    np.testing.assert_array_equal(proposal.tokens[:1], golden["draft_tokens"])
    assert_close(proposal.logits[:1], golden["draft_logits"])
    assert proposal.count.tolist() == [drafts, 0]


@pytest.mark.parametrize("name", ["dflash", "dflash-sliding", "dflash-anchor"])
def test_a_block_shorter_than_the_largest(name):
    proposal, golden = proposal_of(name, golden_outputs(name)["short_logits"].shape[1])
    assert_close(proposal.logits[:1], golden["short_logits"])


def test_a_block_past_its_pages_ends_with_them():
    """Four rows have a page: their three drafts are those of a block of four, whatever lies in page 0."""
    proposal, golden = proposal_of("dflash", DRAFTS, length=ROWS + SHORT + 1, page_size=4)
    assert_close(proposal.logits[:1, :SHORT], golden["short_logits"])


def sight(kind, *, causal, before, positions=(10, 11, 12, 13), pages=4):
    """(first, last) of every row of a block on pages of four."""
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    rows = jnp.array([positions], jnp.int32)
    block = RowBlock(rows, jnp.ones(rows.shape, bool), PageTable(table, 4))
    metadata = build_metadata([kind], block)[kind]
    seen = block_metadata(metadata, kind, causal, before)
    return list(zip(seen.first[0].tolist(), seen.last[0].tolist(), strict=True))


def test_what_a_row_of_a_block_sees():
    full, window = FullAttention(), SlidingWindow(3)
    assert sight(full, causal=False, before=False) == [(0, 13)] * 4
    assert sight(full, causal=True, before=False) == [(0, 10), (0, 11), (0, 12), (0, 13)]
    assert sight(window, causal=True, before=False) == [(8, 10), (9, 11), (10, 12), (11, 13)]
    assert sight(window, causal=False, before=False) == [(8, 12), (9, 13), (10, 13), (11, 13)]
    assert sight(window, causal=True, before=True) == [(8, 10), (8, 11), (8, 12), (8, 13)]
    assert sight(window, causal=False, before=True) == [(8, 13)] * 4
    # Rows without a page see nothing and are not seen.
    assert sight(full, causal=False, before=False, pages=3) == [(0, 11), (0, 11), (0, -1), (0, -1)]


@pytest.fixture
def read():
    """The meaning of a golden's config on its target, with changes to it (None takes a key away)."""
    target = target_config(golden_checkpoint("llama-tied"))

    def read(name, **changes):
        checkpoint = golden_checkpoint(name)
        config = {key: v for key, v in {**checkpoint.config, **changes}.items() if v is not None}
        return DFlashConfig.from_hf(config, checkpoint.tensors, target)

    return read


def test_layers_are_counted_as_each_producer_counts_them(read):
    nested = {"mask_token_id": 11, "target_layer_ids": [0, 3]}
    assert read("dflash", dflash_config=nested).capture == (1, 4)
    assert read("dflash-speculators", aux_hidden_state_layer_ids=[0, 4]).capture == (0, 4)


def test_older_heads_have_the_mask_token_at_the_top(read):
    assert read("dflash", dflash_config={"target_layer_ids": [0]}, mask_token_id=7).mask_token == 7
    nested = {"mask_token_id": 11, "target_layer_ids": [0], "block_size": 4}
    assert read("dflash", dflash_config=nested, block_size=None).block_size == 4


def test_blocks_are_causal_in_windowed_layers_unless_the_config_says_otherwise(read):
    assert read("dflash").causal == (False, False)
    assert read("dflash-sliding").causal == (True, False)
    assert read("dflash-sliding-non-causal").causal == (False, False)
    assert read("dflash-speculators").causal == (True, False)
    assert read("dflash-speculators", sliding_window_non_causal=None).causal == (True, False)
    assert read("dflash-speculators-non-causal").causal == (False, False)
    assert read("dflash-causal").causal == (True, True)
    nested = {**golden_checkpoint("dflash-causal").config["dflash_config"], "causal_head": False}
    assert read("dflash-causal", dflash_config=nested).causal == (False, False)


@pytest.mark.parametrize("name", ["dflash", "dflash-anchor", "dspark", "dspark-gated"])
def test_logits_are_scaled(name, tmp_path):
    """Those of the target's rows and of its own, and what a Markov head adds."""
    folder = changed_copy(name, tmp_path, logit_scale=0.25)
    proposal, golden = proposal_of(name, golden_outputs(name)["draft_tokens"].shape[1], source=folder)
    assert_close(proposal.logits[:1], golden["draft_logits"] * 0.25)


def test_logits_of_own_rows_are_bounded(tmp_path):
    folder = changed_copy("dflash-anchor", tmp_path, final_logit_softcapping=8.0)
    proposal, golden = proposal_of("dflash-anchor", 8, source=folder)
    np.testing.assert_array_equal(proposal.tokens[:1], golden["draft_tokens"])
    assert_close(proposal.logits[:1], np.tanh(golden["draft_logits"] / 8) * 8)


def changed_copy(name, tmp_path, **changes):
    """A golden's folder with changes to its config."""
    checkpoint = golden_checkpoint(name)
    tensors = {key: tensor.read() for key, tensor in checkpoint.tensors.items()}
    return str(write_folder(tmp_path / "head", {**checkpoint.config, **changes}, tensors))


def test_which_rows_draft(read):
    assert not read("dflash").anchor_drafts
    assert not read("dflash-speculators").anchor_drafts
    assert read("dflash-anchor").anchor_drafts
    assert read("dflash-speculators", sample_from_anchor=True).anchor_drafts


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 1}}, "names no target_layer_ids"),
        ("dflash-speculators", {"aux_hidden_state_layer_ids": None}, "names no aux_hidden_state_layer_ids"),
        (
            "dflash",
            {"dflash_config": {"target_layer_ids": [0]}},
            "mask_token_id must be a token of the target",
        ),
        (
            "dflash",
            {"mask_token_id": 1, "dflash_config": {"target_layer_ids": [4]}},
            "layer 4, but the target has 4 layers",
        ),
        ("dflash", {"hidden_size": 64}, "for targets of hidden size 64, this one has 32"),
        (
            "dflash",
            {"target_hidden_size": 32, "hidden_size": 64},
            "bring both embed_tokens.weight and lm_head",
        ),
        ("dflash", {"vocab_size": 64}, "for a vocabulary of 64, the target's has 128"),
        ("dflash", {"block_size": 1}, "block_size must be a whole number of at least 2, got 1"),
        ("dflash", {"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        ("dflash", {"shift_label": True}, "shift_label True is not supported"),
        ("dflash", {"rope_is_neox_style": False}, "rope_is_neox_style False is not supported"),
        ("dflash-anchor", {"markov_rank": 8}, "markov_rank 8 is not supported"),
        ("dflash-anchor", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel, of Gemma 4's layers"),
        ("dflash", {"is_neox_style": False}, "is_neox_style False is not supported"),
        (
            "dflash",
            {"final_logit_softcapping": 30.0},
            "logits with final_logit_softcapping 30.0, and the target's have 0.0",
        ),
        (
            "dflash-anchor",
            {"final_logit_softcapping": 30.0, "logit_scale": 0.5},
            "logit_scale beside final_logit_softcapping is not supported",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(read, name, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(name, **changes)
    assert "\n" not in str(error.value)


def test_more_drafts_than_a_block_has_masks_are_refused():
    config = DrafterConfig("dflash", num_speculative_tokens=8, source=str(golden_folder("dflash")))
    target = target_config(golden_checkpoint("llama-tied"))
    with pytest.raises(ConfigError, match=r"drafts at most 7 \(block_size 8\)"):
        load_drafter(config, type("Target", (), {"config": target}), Build(jnp.dtype(jnp.float32)))


def test_the_embedding_that_heads_of_zlab_share_with_gemma_4_is_scaled(tmp_path):
    """As that of transformers' class is, which z-lab's code calls; speculators' heads have its rows."""
    checkpoint = golden_checkpoint("gemma4")
    target = load_target(checkpoint, dtype=jnp.float32)
    shared = write_dflash(tmp_path / "shared", golden_folder("gemma4"), repeats=False)
    config = json.loads((shared / "config.json").read_text("utf-8"))
    rows = checkpoint.tensors["model.embed_tokens.weight"].read() * np.float32(32**0.5)
    tensors = {**load_file(shared / "model.safetensors"), "embed_tokens.weight": rows}
    own = write_folder(tmp_path / "own", config, tensors)
    paged = PagedTarget(target, 2, 48, page_size=8, width=ROWS)
    history = jnp.zeros((2, 64), jnp.int32).at[0, ROWS].set(5)
    context = GoldenHead.context(SimpleNamespace(paged=paged), jnp.zeros((2 * ROWS, 0)), history=history)
    logits = []
    for source in (shared, own):
        made = DrafterConfig("dflash", num_speculative_tokens=3, source=str(source))
        head = load_drafter(made, target, Build(jnp.dtype(jnp.float32)))
        proposal, _ = propose(head, target, context, paged.new_cache(head.cache_shapes))
        logits.append(np.asarray(proposal.logits[:1]))
    assert_close(*logits)
    assert np.abs(logits[0]).max() < 20  # bounded like the target's

    tensors = load_file(shared / "model.safetensors")
    stated = DFlashConfig.from_hf({**config, "final_logit_softcapping": 20.0}, tensors, target.config)
    assert stated.logit_bound == 0.0  # as it already is
    with pytest.raises(ConfigError, match=r"final_logit_softcapping 30.0, and the target's have 20.0"):
        DFlashConfig.from_hf({**config, "final_logit_softcapping": 30.0}, tensors, target.config)

    repeats = json.loads((write_dflash(tmp_path / "s", golden_folder("gemma4")) / "config.json").read_text())
    assert DFlashConfig.from_hf(repeats, {}, target.config).embedding_scale == 1.0
