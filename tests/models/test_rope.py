"""Rope parameters in the old and the new spelling of `config.json`, and the frequencies they give."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import TARGET

from jaxspec.attention.rope import apply_rope
from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.models.layers.rope import rope_frequencies, rope_tables

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}),
    ],
)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_legacy_keys_mean_the_same_as_rope_parameters(kind, parameters, key):
    new = {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **parameters}}
    old = {"rope_theta": 5e5, "rope_scaling": {key: kind, **parameters}}
    both = {**old, "rope_scaling": {"type": kind, "rope_type": kind, **parameters}}
    limit = {"max_position_embeddings": 512}
    expected = RopeConfig.from_hf({**new, **limit})
    assert expected.theta == 5e5
    assert expected.kind == kind
    assert RopeConfig.from_hf({**old, **limit}) == RopeConfig.from_hf({**both, **limit}) == expected


def test_the_two_keys_together_must_agree():
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}
    both = {**new, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": None}}
    assert RopeConfig.from_hf(both) == RopeConfig.from_hf(new)


def test_no_rope_key_means_a_base_of_10000():
    for config in ({}, {"rope_scaling": None}, {"rope_parameters": None, "rope_theta": None}):
        assert RopeConfig.from_hf(config) == RopeConfig.from_hf({"rope_theta": 10000.0})


@pytest.mark.parametrize("within", [{}, {"original_max_position_embeddings": 32}])
def test_a_trained_length_at_the_top_level_counts_first(within):
    yarn = {"rope_type": "yarn", "factor": 4.0, **within}
    for key in ("rope_scaling", "rope_parameters"):
        config = {key: yarn, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
        assert RopeConfig.from_hf(config)["original_max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("yarn", "positions"),
    [
        # As the cards of Qwen2.5 and Qwen3 ask for it, with a length of 32,768 and 40,960 in the file.
        ({"factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"factor": 4.0}, 163_840),
        ({"factor": 1.5, "original_max_position_embeddings": 1_000}, 40_960),
        ({"factor": 1e30}, 2**31 - 1),
        ({"factor": 4.0, "rope_type": "linear"}, 40_960),
    ],
)
def test_yarn_extends_the_length_that_the_file_states(yarn, positions):
    rope = {"rope_scaling": {"rope_type": "yarn", **yarn}, "max_position_embeddings": 40_960}
    assert ModelConfig.from_hf({**TARGET, **rope}).max_position_embeddings == positions


def test_llama3_keeps_fast_frequencies_divides_slow_ones_and_blends_between():
    plain, _ = rope_frequencies(RopeConfig(5e5), 128)
    config = RopeConfig(5e5, "llama3", tuple(LLAMA3.items()))
    scaled, factor = rope_frequencies(config, 128)
    wavelength = 2 * np.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    assert factor == 1.0
    assert fast.sum() > 10
    assert slow.sum() > 10
    np.testing.assert_allclose(scaled[fast], plain[fast], rtol=1e-6)
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize(("fast", "slow", "divided"), [(16, 1, "slow"), (1, 16, "fast")])
def test_yarn_divides_the_frequencies_beyond_the_second_bound(fast, slow, divided):
    plain, _ = rope_frequencies(RopeConfig(1e4), 16)
    bounds = {"beta_fast": fast, "beta_slow": slow, "original_max_position_embeddings": 512}
    scaled, _ = rope_frequencies(RopeConfig(1e4, "yarn", (("factor", 4.0), *bounds.items())), 16)
    ends = {"fast": slice(0, 1), "slow": slice(-1, None)}
    for name, end in ends.items():
        np.testing.assert_allclose(plain[end] / scaled[end], 4.0 if name == divided else 1.0, rtol=1e-6)


def test_factors_of_a_gguf_divide_the_frequencies():
    plain, _ = rope_frequencies(RopeConfig(1e4), 8)
    divided, _ = rope_frequencies(RopeConfig(1e4, "factors", (("factors", (1.0, 2.0, 4.0, 8.0)),)), 8)
    np.testing.assert_allclose(divided, plain / [1, 2, 4, 8], rtol=1e-6)


def test_angles_stay_exact_far_into_a_context():
    position = np.array([8191])
    cos, sin = rope_tables(RopeConfig(1e4), 4, position)
    angle = 8191 * np.array([1.0, 0.01])
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=1e-3)


def test_without_rope_nothing_is_rotated():
    x = np.random.default_rng(0).normal(size=(5, 2, 8)).astype(np.float32)
    np.testing.assert_array_equal(apply_rope(x, rope_tables(None, 8, np.arange(5))), x)


@pytest.mark.parametrize(("kind", "parameters"), [("default", {}), ("yarn", {"factor": 4.0})])
def test_what_is_not_rotated_stays_as_it_is(kind, parameters):
    config = RopeConfig(1e4, kind, (*parameters.items(), ("original_max_position_embeddings", 32)), share=0.5)
    cos, sin = rope_tables(config, 16, np.arange(5))
    assert cos.shape == sin.shape == (5, 8)
    assert (cos[:, 4:] == 1).all()
    assert (sin[:, 4:] == 0).all()
    assert (sin[1:, :4] != 0).all()
    whole_cos, whole_sin = rope_tables(replace(config, share=1.0), 8, np.arange(5))
    np.testing.assert_array_equal(cos[:, :4], whole_cos)
    np.testing.assert_array_equal(sin[:, :4], whole_sin)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "wide"}}, "unknown rope_type 'wide'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "needs short_factor, long_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling has rope_type 'yarn', but rope_parameters has 'default'",
        ),
    ],
)
def test_what_is_not_built_is_refused(config, message):
    with pytest.raises(ConfigError, match=message) as error:
        RopeConfig.from_hf(config)
    assert "\n" not in str(error.value)
