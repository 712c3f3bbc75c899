"""A GGUF of every family is the network that the checkpoint on the Hub is, weight by weight."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from converted_gguf import (
    ARCHITECTURES,
    NORMS_FROM_0,
    architecture_of,
    without_dense_layers,
    write_converted,
)
from golden_files import golden_checkpoint
from target_checks import check_one_pass
from tiny_gguf import metadata, write_gguf
from tiny_tokenizers import byte_level

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.gguf.architecture import ARCHITECTURES as READ
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor
from jaxspec.models.language_model import language_model
from jaxspec.models.layers.rope import rope_frequencies
from jaxspec.models.target import load_target, plan_target, target_config


def with_config(**changes):
    return lambda checkpoint: replace(checkpoint, config={**checkpoint.config, **changes})


def with_rope(**changes):
    return lambda checkpoint: with_config(
        rope_parameters={**checkpoint.config["rope_parameters"], **changes}, num_nextn_predict_layers=0
    )(checkpoint)


def with_mtp(case, **changes):
    """With the golden of the model's layer that drafts."""

    def change(checkpoint):
        tensors = {**checkpoint.tensors, **golden_checkpoint(case).tensors}
        return with_config(**changes)(replace(checkpoint, tensors=tensors))

    return change


NO_LENGTH = {"max_position_embeddings": 2**20}
THIRD = {"rope_type": "proportional", "partial_rotary_factor": 1 / 3, "rope_theta": 1e6}
TABLE = np.zeros((266, 256), np.float32)

CASES = {
    "llama-tied": None,
    "llama-untied-llama3-rope": None,
    "llama-linear-rope": None,
    "llama-yarn-rope": None,
    "qwen2-tied": None,
    "qwen3-tied": None,
    "qwen3-moe": without_dense_layers,
    "gemma3": with_config(query_pre_attn_scalar=16),
    "gemma4": None,
    "gemma4-moe": lambda checkpoint: with_rope(full_attention=THIRD)(checkpoint),
    "glm4": None,
    "glm4-yarn-rope": None,
    "gpt-oss": None,
    "gpt-oss-mxfp4": None,
    "deepseek-v3": with_rope(mscale=0.6),
    "deepseek-v3-direct": with_config(rope_interleave=True, num_nextn_predict_layers=0),
    "glm4-moe-lite": with_config(model_type="deepseek_v3", num_nextn_predict_layers=0),
    "olmo2": None,
    "olmo3": lambda checkpoint: with_rope(sliding_attention={"rope_type": "default", "rope_theta": 5000.0})(
        checkpoint
    ),
    "smollm3": None,
    "phi3": None,
    "phi3-long": None,
    "granite": None,
    "minimax-m2": None,
    "lfm2": None,
    "qwen3-next": without_dense_layers,
    "qwen3-5": with_mtp("qwen3-5-mtp", mtp_num_hidden_layers=1),
    "qwen3-5-moe": with_config(intermediate_size=16),
    "nemotron-h": with_mtp("nemotron-h-mtp", **NO_LENGTH, num_nextn_predict_layers=1, intermediate_size=16),
    "nemotron-h-latent": with_config(**NO_LENGTH),
    "nemotron-h-dense": with_config(**NO_LENGTH),
}
"""Goldens, with what a file cannot say of them replaced by what it says."""


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """A checkpoint on the Hub's layout, and the GGUF of it."""
    change = CASES[request.param] or (lambda checkpoint: checkpoint)
    checkpoint = change(golden_checkpoint(request.param))
    written = open_checkpoint(write_converted(tmp_path / "tiny.gguf", checkpoint))
    return language_model(checkpoint), language_model(written)


def test_every_tensor_is_the_same(pair):
    expected, found = pair
    from_0 = architecture_of(expected.config) in NORMS_FROM_0
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        read = found.tensors[name]
        assert read.shape == tensor.shape
        # Adding 1 to a norm's weights rounds them, and so does the exponential.
        is_rounded = name.endswith(".A_log") or ("norm" in name and from_0)
        rounding = 2e-7 if is_rounded else 0
        np.testing.assert_allclose(read.read(), tensor.read(), rtol=rounding, atol=rounding, err_msg=name)
        assert read.read().dtype == read.dtype
        if isinstance(tensor, Mxfp4Tensor):
            for one, other in zip(read.read_packed(), tensor.read_packed(), strict=True):
                np.testing.assert_array_equal(one, other)


def test_the_network_is_the_same(pair):
    expected, found = (target_config(checkpoint) for checkpoint in pair)
    for one, other in ((expected.rope, found.rope), (expected.local_rope, found.local_rope)):
        if one is None:
            assert other is None
            continue
        frequencies, factor = rope_frequencies(one, expected.head_dim)
        read, read_factor = rope_frequencies(other, found.head_dim)
        np.testing.assert_allclose(read, frequencies, rtol=1e-6)
        assert read_factor == pytest.approx(factor, rel=1e-6)
    scales = [config.attention_scale or config.head_dim**-0.5 for config in (found, expected)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    same = {"rope": RopeConfig(), "local_rope": None, "attention_scale": None}
    assert replace(found, **same) == replace(expected, **same)


def assert_same(found, expected):
    assert ModelConfig.from_hf(found.config) == ModelConfig.from_hf(expected.config)
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].read(), tensor.read(), err_msg=name)


SEEING = {"qwen2_5_vl_text": ("qwen2.5-vl", "qwen2"), "qwen3_vl_text": ("qwen3-vl", "qwen3")}
"""Language models of those that see: a golden, and the family that their files hold."""


@pytest.mark.parametrize("family", SEEING)
def test_the_file_of_one_that_sees_holds_a_model_that_does_not(tmp_path, family):
    case, model_type = SEEING[family]
    whole = golden_checkpoint(case)
    config = {**whole.config["text_config"], "tie_word_embeddings": whole.config["tie_word_embeddings"]}
    text = replace(language_model(whole), config=config)
    sections = {"rope__dimension_sections": [2, 1, 1, 0]}
    found = open_checkpoint(write_converted(tmp_path / "tiny.gguf", text, **sections))
    assert found.config["model_type"] == model_type
    assert_same(found, replace(text, config={**config, "model_type": model_type}))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    checkpoint = CASES["deepseek-v3"](golden_checkpoint("deepseek-v3"))
    expected = open_checkpoint(write_converted(tmp_path / "one.gguf", checkpoint))
    names = ("blk.3.nextn.eh_proj.weight", "blk.3.attn_norm.weight")
    further = {name: np.zeros((4, 4), np.float32) for name in names}
    path = write_converted(tmp_path / "two.gguf", checkpoint, further, block_count=4, nextn_predict_layers=1)
    assert_same(open_checkpoint(path), expected)


def test_latents_of_older_files(tmp_path):
    """They hold the projection up whole, and the sizes of a head under other keys."""
    checkpoint = CASES["deepseek-v3"](golden_checkpoint("deepseek-v3"))
    expected = open_checkpoint(write_converted(tmp_path / "one.gguf", checkpoint))
    others = {f"blk.{i}.attn_{half}_b.weight": None for i in range(3) for half in ("k", "v")}
    for i in range(3):
        name = f"model.layers.{i}.self_attn.kv_b_proj.weight"
        others[f"blk.{i}.attn_kv_b.weight"] = checkpoint.tensors[name].read()
    sizes = {"attention__key_length": 20, "attention__value_length": 10, "attention__head_count_kv": 4}
    nothing = dict.fromkeys(("attention__key_length_mla", "attention__value_length_mla"))
    path = write_converted(tmp_path / "two.gguf", checkpoint, others, **sizes, **nothing)
    assert_same(open_checkpoint(path), expected)


def test_recurrent_layers_may_be_listed(tmp_path):
    checkpoint = CASES["qwen3-5"](golden_checkpoint("qwen3-5"))
    listed = {"attention__recurrent_layers": [True, False, True, False, False]}
    path = write_converted(tmp_path / "tiny.gguf", checkpoint, full_attention_interval=None, **listed)
    assert open_checkpoint(path).config["layer_types"] == checkpoint.config["layer_types"]


def test_older_files_of_qwen3_next_hold_its_projection_whole(tmp_path):
    checkpoint = without_dense_layers(golden_checkpoint("qwen3-next"))
    name = "model.layers.{}.linear_attn.in_proj_qkvz.weight"
    others = {f"blk.{i}.{leaf}.weight": None for i in (0, 1) for leaf in ("attn_qkv", "attn_gate")}
    others |= {f"blk.{i}.ssm_in.weight": checkpoint.tensors[name.format(i)].read() for i in (0, 1)}
    found = open_checkpoint(write_converted(tmp_path / "tiny.gguf", checkpoint, others))
    for i in (0, 1):
        expected = checkpoint.tensors[name.format(i)].read()
        np.testing.assert_array_equal(found.tensors[name.format(i)].read(), expected)


def test_a_layer_of_nemotron_h_is_what_its_tensors_are(tmp_path):
    message = refused(tmp_path, "nemotron-h", {"blk.0.ssm_in.weight": None})
    assert "layer 0 has none of ssm_in, attn_q, ffn_gate_inp, ffn_up" in message


def test_a_state_that_never_decays_is_named(tmp_path):
    """-exp(A_log) is never 0."""
    checkpoint = CASES["qwen3-5"](golden_checkpoint("qwen3-5"))
    path = write_converted(tmp_path / "bad.gguf", checkpoint, {"blk.2.ssm_a": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"layers\.2\.linear_attn\.A_log' holds NaN"):
        load_target(open_checkpoint(path), dtype=jnp.float32)


@pytest.mark.parametrize("case", ["qwen3-5", "nemotron-h"])
def test_logits_are_those_of_the_original(tmp_path, case):
    checkpoint = (CASES[case] or (lambda checkpoint: checkpoint))(golden_checkpoint(case))
    check_one_pass(case, open_checkpoint(write_converted(tmp_path / "tiny.gguf", checkpoint)))


def refused(tmp_path, case, tensors=None, **changes):
    """What is said of a golden's GGUF with other metadata or tensors before weights would be read."""
    checkpoint = (CASES[case] or (lambda checkpoint: checkpoint))(golden_checkpoint(case))
    path = write_converted(tmp_path / "bad.gguf", checkpoint, tensors or {}, **changes)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        plan_target(open_checkpoint(path), dtype=jnp.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "qwen2-tied",
            {"attention__head_count": None},
            "qwen2.attention.head_count must be",
        ),
        (
            "qwen3-tied",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping 30.0 is not supported",
        ),
        ("llama-tied", {"attention__temperature_scale": 0.1}, "temperature_scale 0.1 is not supported"),
        (
            "llama-yarn-rope",
            {"rope__scaling__attn_factor": 2.0},
            "scaling.attn_factor 2.0 is not supported",
        ),
        ("llama-linear-rope", {"rope__scaling__type": "longrope"}, "needs short_factor, long_factor"),
        ("llama-linear-rope", {"rope__scaling__type": "wide"}, "unknown rope_type 'wide'"),
        ("qwen3-moe", {"expert_count": None}, "qwen3moe.expert_count must be a positive integer"),
        ("gemma3", {"attention__sliding_window": None}, "gemma3.attention.sliding_window must be"),
        ("gemma4", {"attention__sliding_window_pattern": [True]}, "pattern has 1 entries for 6 layers"),
        (
            "gemma4",
            {"attention__head_count_kv": [2, 2, 2, 1, 2, 2]},
            "head_count_kv [2, 2, 2, 1, 2, 2] is not",
        ),
        ("gemma4", {"feed_forward_length": [48] * 4 + [50, 50]}, "feed_forward_length is not supported"),
        ("glm4", {"rope__dimension_count": 5}, "is 5 of 12 entries, and rope rotates pairs"),
        ("glm4", {"rope__dimension_count": 14}, "rope over 14 of 12 dimensions is not supported"),
        ("glm4", {"rope__dimension_sections": [2, 2, 2]}, "glm4.rope.dimension_sections is not supported"),
        ("llama-tied", {"rope__dimension_count": 4}, "rope over 4 of 8 dimensions is not supported"),
        ("gpt-oss", {"expert_used_count": 9}, "num_experts_per_tok 9 is not between 1 and"),
        ("phi3", {"rope__dimension_count": 7}, "is 7 of 16 entries, and rope rotates pairs"),
        ("olmo2", {"attention__sliding_window": 7, "attention__sliding_window_pattern": [True]}, "1 entries"),
        ("llama-tied", {"logit_scale": 2.0}, "llama.logit_scale 2.0 is not supported"),
        ("qwen3-tied", {"attention__scale": 0.2}, "qwen3.attention.scale 0.2 is not supported"),
        ("qwen3-5", {"ssm__inner_size": 47}, "qwen35.ssm.inner_size 47 is no multiple of 4 heads"),
        ("qwen3-5", {"attention__recurrent_layers": [True]}, "layers has 1 entries for 4 layers"),
        ("nemotron-h", {"ssm__inner_size": 47}, "ssm.inner_size 47 is no multiple of 6 heads"),
        ("nemotron-h", {"attention__head_count_kv": [0, 1, 2]}, "must list one number of heads and 0"),
        (
            "nemotron-h",
            {"nextn_predict_layers": 0},
            "spare tensor 'model.layers.5.eh_proj.weight'",
        ),
        ("deepseek-v3", {"expert_gating_func": 1}, "scoring_func 'softmax' is not supported"),
        ("deepseek-v3", {"attention__key_length_mla": 3}, "qk_nope_head_dim must be a positive integer"),
    ],
)
def test_metadata_that_is_missing_or_not_supported_is_named(tmp_path, case, changes, message):
    assert message in refused(tmp_path, case, **changes)


@pytest.mark.parametrize(
    ("case", "tensor", "shape", "message"),
    [
        ("qwen2-tied", "blk.1.attn_q.bias", (31,), "self_attn.q_proj.bias' has shape [31], expected [32]"),
        (
            "glm4",
            "blk.1.ffn_up.weight",
            (48, 32),
            "gate_up_proj.weight' has shape [48, 32], expected [96, 32]",
        ),
        ("glm4", "blk.1.ffn_gate.weight", (48, 32), "'blk.1.ffn_gate.weight' is not part of the glm4"),
        ("glm4", "blk.1.attn_output.bias", (32,), "tensor 'model.layers.1.self_attn.o_proj.bias'"),
        ("gemma4-moe", "blk.1.ffn_down_exps.weight", (8, 9), "down_proj.weight' of shape [8, 9] is not"),
        ("gemma4", "rope_freqs.weight", (8,), "'rope_freqs.weight' divides frequencies"),
        ("gemma3", "blk.1.post_ffw_norm.weight", (9,), "post_feedforward_layernorm.weight' has shape [9]"),
        (
            "qwen3-moe",
            "blk.1.ffn_up_exps.weight",
            (8, 9),
            "experts.up_proj.weight' of shape [8, 9] is not",
        ),
        ("qwen3-moe", "blk.1.ffn_up_exps.weight", (7, 16, 32), "experts.7.up_proj.weight' is missing"),
        ("gpt-oss", "blk.1.ffn_up_exps.weight", (4, 9, 32), "has no matching projection"),
        ("gpt-oss", "blk.1.ffn_down_exps.weight", (4, 9), "down_proj.weight' of shape [4, 9] is not"),
        ("deepseek-v3", "blk.1.attn_k_b.weight", (4, 9), "are not the halves of one projection"),
        ("deepseek-v3", "blk.1.attn_v_b.weight", (4, 10, 9), "are not the halves of one projection"),
        (
            "deepseek-v3",
            "blk.1.attn_v_b.weight",
            (4, 9, 16),
            "kv_b_proj.weight' has shape [84, 16]",
        ),
        ("qwen3-next", "blk.0.attn_gate.weight", (47, 32), "are not the parts of one projection"),
        ("qwen3-5", "blk.0.ssm_beta.weight", (5, 32), "in_proj_b.weight' of shape [5, 32] is not that of 4"),
        ("qwen3-5", "blk.0.ssm_out.weight", (32, 47), "of shape [32, 47] is not that of 4 heads"),
        ("qwen3-5", "blk.0.ssm_alpha.weight", (8, 32), "in_proj_a.weight' has shape [8, 32]"),
        ("qwen3-5", "blk.0.ssm_a", (4, 2), "A_log' has shape [4, 2], expected [4]"),
        ("nemotron-h", "blk.0.ssm_d", (5, 1), "mixer.D' has shape [5], expected [6]"),
        (
            "llama-tied",
            "blk.0.ssm_a.weight",
            (4,),
            "'blk.0.ssm_a.weight' is not part of the llama",
        ),
    ],
)
def test_a_tensor_of_the_wrong_size_is_named(tmp_path, case, tensor, shape, message):
    assert message in refused(tmp_path, case, {tensor: np.full(shape, tensor.endswith("bias"), np.float32)})


def test_a_vocabulary_that_does_not_fit_is_named(tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", {**metadata(), **byte_level()}, {"token_embd.weight": TABLE})
    with pytest.raises(CheckpointError, match="a vocabulary of 267 tokens does not fit an embedding of 266"):
        open_checkpoint(path)


def test_every_architecture_is_tested():
    tested = {architecture_of(golden_checkpoint(case).config) for case in CASES}
    assert tested | {ARCHITECTURES[family] for family in SEEING} == set(READ)
