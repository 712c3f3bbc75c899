"""DeepSeek-V4 against transformers: windows, entries, indexer, streams, experts by token; names."""

import re
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import V4_TARGETS, assert_close, golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget

import jaxspec
from jaxspec import ConfigError
from jaxspec.attention import CompressedAttention, PackedMemory
from jaxspec.config import ModelConfig
from jaxspec.models.deepseek_v4_names import module_name
from jaxspec.models.language_model import language_model
from jaxspec.models.target import load_target
from jaxspec.weights.loading import export_tensors

LENGTH, PROMPT = 300, 20


@pytest.fixture(scope="module", params=V4_TARGETS)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case):
    return load_target(golden_checkpoint(case), dtype=jnp.float32)


@pytest.fixture(scope="module")
def golden(case):
    return golden_outputs(case)


def pieces(model, ids, size, page_size):
    """Logits of texts [B, S], so many rows at a time through a cache of NaN."""
    paged = PagedTarget(model, *ids.shape, page_size=page_size, width=size, fill=np.nan)
    starts = range(0, ids.shape[1], size)
    parts = [paged.feed(ids[:, start : start + size], [start] * len(ids))[0] for start in starts]
    return np.concatenate(parts, axis=1)[:, : ids.shape[1]]


def test_pieces_equal_transformers(model, golden):
    assert_close(pieces(model, golden["input_ids"], 11, 4), golden["logits"])


def test_one_pass_equals_transformers():
    case = "deepseek-v4"
    model, golden = load_target(golden_checkpoint(case), dtype=jnp.float32), golden_outputs(case)
    assert_close(pieces(model, golden["input_ids"], LENGTH, 16), golden["logits"])


def test_a_text_without_a_cache_equals_transformers():
    """Two texts in one sequence; the first is part of the golden."""
    case = "deepseek-v4-odd-ratios"
    model, golden = load_target(golden_checkpoint(case), dtype=jnp.float32), golden_outputs(case)
    ids = golden["input_ids"][0]
    tokens = np.concatenate([ids[:37], ids[:261]])
    positions = np.concatenate([np.arange(37), np.arange(261)]).astype(np.int32)
    segments = np.repeat([0, 1], [37, 261])

    @nnx.jit
    def logits_of(model, tokens):
        hidden, _, _ = model(tokens, positions, PackedMemory(model.kinds, positions[None], segments[None]))
        return model.logits(hidden)

    logits = np.asarray(logits_of(model, jnp.asarray(tokens)))
    assert_close(logits[:37], golden["logits"][0, :37])
    assert_close(logits[37:], golden["logits"][0, :261])


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 5])
def test_entries_of_rejected_rows_are_made_again(accepted):
    """Seven rows a pass of which so many drafts stand, as in verification: the others hold wrong tokens."""
    case, length = "deepseek-v4-odd-ratios", 45
    model, golden = load_target(golden_checkpoint(case), dtype=jnp.float32), golden_outputs(case)
    ids, expected = golden["input_ids"], golden["logits"]
    paged = PagedTarget(model, 1, length + 6, page_size=8, width=7, fill=np.nan)
    start = 0
    while start < length:
        rows = ids[:, start : start + 7].copy()
        rows[:, accepted + 1 :] = 47 - rows[:, accepted + 1 :]
        logits, _, _ = paged.feed(rows, [start])
        stand = min(accepted + 1, length - start)
        assert_close(logits[:, :stand], expected[:, start : start + stand])
        start += stand


def test_slots_at_other_offsets_do_not_disturb_each_other():
    """The second slot is five tokens ahead of the first, so that entries end at different rows."""
    model = load_target(golden_checkpoint("deepseek-v4"), dtype=jnp.float32)
    golden = golden_outputs("deepseek-v4")
    ids, expected = golden["input_ids"][0], golden["logits"][0]
    paged = PagedTarget(model, 2, 70, page_size=16, width=5, fill=np.nan)
    paged.feed([[], ids[:5]], [0, 0])
    for start in range(0, 60, 3):
        logits, _, _ = paged.feed([ids[start : start + 3], ids[start + 5 : start + 8]], [start, start + 5])
        for slot, at in enumerate((start, start + 5)):
            assert_close(logits[slot, :3], expected[at : at + 3])


@pytest.mark.parametrize("case", ["deepseek-v4", "deepseek-v4-odd-ratios"])
def test_greedy_answers_equal_transformers(case):
    """Prompts in chunks, alone and eight at once; drafts that are rejected go through every kind of layer."""
    golden = golden_outputs(case)
    with jaxspec.load(
        golden_folder(case),
        drafter={"kind": "ngram", "num_speculative_tokens": 3},
        max_model_len=LENGTH + 8,
        batch_size=8,
        prefill_chunk=8,
        sampling_modes=("greedy",),
        progress=False,
    ) as engine:
        prompts = [row[:PROMPT].tolist() for row in golden["greedy"]]
        wanted = {"max_new_tokens": LENGTH - PROMPT, "ignore_eos": True}
        answers = [engine.generate(prompts[0], **wanted), *engine.generate(prompts, **wanted)]
    expected = golden["greedy"][:, PROMPT:]
    for answer, row in zip(answers, [expected[0], *expected], strict=True):
        assert answer.token_ids == row.tolist()
    drafted = sum(answer.stats.drafted for answer in answers)
    assert 0 < sum(answer.stats.accepted for answer in answers) < drafted


def test_export_gives_back_every_tensor(case, model):
    stored, exported = language_model(golden_checkpoint(case)).tensors, export_tensors(model)
    assert set(exported) == set(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(exported[name], tensor.read(), err_msg=name)


def test_layers_have_the_kinds_of_the_config():
    windows = CompressedAttention(16)
    sparse, heavy = replace(windows, ratio=5, overlaps=True), replace(windows, ratio=11)
    model = load_target(golden_checkpoint("deepseek-v4-default-layers"), dtype=jnp.float32)
    assert model.kinds == (heavy, heavy, heavy, sparse)
    window, states, entries, keys = model.cache_shapes[3]
    assert (window.head_dim, states.head_dim) == (8, 4 * 8 + 4 * 8)
    assert entries.positions_per_entry == keys.positions_per_entry == 5


PUBLISHED = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "layers.2.attn_norm.weight": "model.layers.2.input_layernorm.weight",
    "layers.2.ffn_norm.weight": "model.layers.2.post_attention_layernorm.weight",
    "layers.2.hc_attn_base": "model.layers.2.attn_hc.base",
    "layers.2.hc_ffn_scale": "model.layers.2.ffn_hc.scale",
    "layers.2.attn.attn_sink": "model.layers.2.self_attn.sinks",
    "layers.2.attn.kv_norm.weight": "model.layers.2.self_attn.kv_norm.weight",
    "model.layers.2.attn.norm.weight": "model.layers.2.self_attn.kv_norm.weight",
    "layers.2.attn.q_norm.weight": "model.layers.2.self_attn.q_a_norm.weight",
    "layers.2.attn.wq_a.weight": "model.layers.2.self_attn.q_a_proj.weight",
    "layers.2.attn.wo_b.weight": "model.layers.2.self_attn.o_b_proj.weight",
    "layers.2.attn.compressor.ape": "model.layers.2.self_attn.compressor.position_bias",
    "layers.2.attn.compressor.norm.weight": "model.layers.2.self_attn.compressor.kv_norm.weight",
    "layers.2.attn.compressor.wgate.weight": "model.layers.2.self_attn.compressor.gate_proj.weight",
    "layers.2.attn.indexer.wq_b.weight": "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
    "layers.2.attn.indexer.weights_proj.weight": (
        "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
    "layers.2.attn.indexer.compressor.wkv.weight": (
        "model.layers.2.self_attn.compressor.indexer.kv_proj.weight"
    ),
    "layers.2.attn.indexer.compressor.norm.weight": (
        "model.layers.2.self_attn.compressor.indexer.kv_norm.weight"
    ),
    "layers.2.ffn.gate.bias": "model.layers.2.mlp.gate.e_score_correction_bias",
    "layers.2.ffn.gate.tid2eid": "model.layers.2.mlp.gate.tid2eid",
    "layers.2.ffn.experts.17.w1.weight": "model.layers.2.mlp.experts.17.gate_proj.weight",
    "layers.2.ffn.experts.17.w2.weight": "model.layers.2.mlp.experts.17.down_proj.weight",
    "layers.2.ffn.shared_experts.w3.weight": "model.layers.2.mlp.shared_experts.up_proj.weight",
    "mtp.0.attn.wkv.weight": "mtp.0.self_attn.kv_proj.weight",
    "mtp.0.norm.weight": "mtp.0.shared_head.norm.weight",
    "mtp.0.head.weight": "mtp.0.shared_head.head.weight",
    "mtp.0.emb.tok_emb.weight": "mtp.0.embed_tokens.weight",
    "mtp.0.hc_head_base": "mtp.0.hc_head.hc_base",
    "mtp.0.e_proj.weight": "mtp.0.e_proj.weight",
}


def test_published_names_are_those_of_modules():
    for published, name in PUBLISHED.items():
        assert module_name(published) == name
        assert module_name(name) == name


def test_a_checkpoint_with_published_names_is_the_same(case, model):
    """As transformers writes them, but without "model." in front and with the published names of three."""
    checkpoint = golden_checkpoint(case)
    own = {"model.embed_tokens.weight": "embed.weight"}
    published = {
        own.get(name, re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name.removeprefix("model."))): tensor
        for name, tensor in checkpoint.tensors.items()
    }
    published = {name.replace("hc_head.hc_", "hc_head_"): tensor for name, tensor in published.items()}
    again = export_tensors(load_target(replace(checkpoint, tensors=published), dtype=jnp.float32))
    for name, array in export_tensors(model).items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "qk_rope_head_dim": 64,
    "num_hash_layers": 3,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""Keys of a published `config.json`."""


def test_published_keys_are_read():
    config = ModelConfig.from_hf(FLASH)
    assert config.compressed.layers == (
        *["sliding_attention"] * 2,
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    )
    assert (config.compressed.sparse_ratio, config.compressed.heavy_ratio) == (4, 128)
    assert (config.head_dim, config.compressed.head_dim) == (64, 512)
    assert config.moe.hash_layers == (0, 1, 2)
    assert (config.rope.kind, config.rope.theta, config.rope["attention_factor"]) == ("yarn", 160000.0, 1.0)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 10000.0)
    assert config.max_position_embeddings == 2**20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 0, 4]}, "layer_types has 3 entries for 5 layers"),
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "compress_ratios: 64 is not supported"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types: unknown kind 'full_attention'"),
        (
            {"compress_rates": {"compressed_sparse_attention": 1}},
            "a sparse compressed entry needs 2 positions",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"o_groups": 7}, "num_attention_heads 64 is not a multiple of o_groups 7"),
        ({"hc_mult": 0}, "hc_mult must be a positive integer"),
        ({"compress_rope_theta": 1.0}, "compress_rope_theta must be a number above 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_hf({**FLASH, **changes})
    assert "\n" not in str(error.value)


def first_layers(checkpoint):
    """Of a checkpoint only the first two layers, which compile in half the time."""
    config, lists = checkpoint.config, ("layer_types", "mlp_layer_types")
    config = {**config, "num_hidden_layers": 2, **{key: config[key][:2] for key in lists}}
    is_later = re.compile(r"(model\.)?layers\.([2-9]|\d\d)\.|mtp\.").match
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not is_later(name)}
    return replace(checkpoint, config=config, tensors=tensors)


@cache
def logits_of_first_layers(name):
    model = load_target(first_layers(golden_checkpoint(name)), dtype=jnp.float32)
    return pieces(model, golden_outputs(name)["input_ids"], LENGTH, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek-v4", {"sliding_window": 9}),
        ("deepseek-v4", {"index_topk": 5}),
        ("deepseek-v4", {"hc_sinkhorn_iters": 1}),
        ("deepseek-v4", {"hc_eps": 1e-2}),
        ("deepseek-v4", {"swiglu_limit": 1.4}),
        ("deepseek-v4", {"routed_scaling_factor": 1.4}),
        ("deepseek-v4", {"rms_norm_eps": 2e-3}),
        ("deepseek-v4", "compress rope"),
        ("deepseek-v4", "main rope"),
        ("deepseek-v4", "experts_of"),
        ("deepseek-v4", "selection_bias"),
        ("deepseek-v4", "sinks"),
        ("deepseek-v4", "position_bias"),
        ("deepseek-v4", "index_weights"),
        ("deepseek-v4-wide-window", {"sliding_window": 71}),
    ],
)
def test_every_part_shows_in_the_goldens(name, change):
    """What the goldens would not notice, they would not test. The first two layers have every part."""
    checkpoint, ids = first_layers(golden_checkpoint(name)), golden_outputs(name)["input_ids"]
    config = checkpoint.config
    ropes = config["rope_parameters"]
    if change == "compress rope":
        change = {"rope_parameters": {**ropes, "compress": {**ropes["compress"], "factor": 4.5}}}
    if change == "main rope":
        change = {"rope_parameters": {**ropes, "main": {**ropes["main"], "rope_theta": 9000.0}}}
    changes = change if isinstance(change, dict) else {}
    model = load_target(replace(checkpoint, config={**config, **changes}), dtype=jnp.float32)
    first, sparse = model.layers[:2]
    if change == "experts_of":
        first.mlp.experts_of.set_value(first.mlp.experts_of[...][::-1])
    zeroed = {
        "selection_bias": sparse.mlp.selection_bias,
        "sinks": sparse.attention.sinks,
        "position_bias": sparse.attention.compressor.keys.position_bias,
    }
    for part, value in zeroed.items():
        if part == change:
            value.set_value(0 * value[...])  # on its device, for which the program is compiled
    if change == "index_weights":
        kernel = sparse.attention.compressor.index_weights.kernel
        kernel.set_value(-kernel[...])
    logits, expected = pieces(model, ids, LENGTH, 16), logits_of_first_layers(name)
    assert np.abs(logits - expected).max() > 1e-3 * np.abs(expected).max()
