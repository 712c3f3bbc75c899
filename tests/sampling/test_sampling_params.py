import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import SamplingMode, SamplingParams, SamplingState, process_logits, seed_words


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.temperature == 0
    assert params.top_k == 0
    assert params.top_p == 1
    assert params.min_p == 0
    assert params.seed is None


def test_values_are_normalised():
    params = SamplingParams(temperature=1, top_k=-1, stop="\n", stop_token_ids=[np.int32(3), 4])
    assert params == SamplingParams(temperature=1.0, top_k=0, stop=("\n",), stop_token_ids=(3, 4))
    assert hash(params) == hash(SamplingParams(temperature=1.0, stop=["\n"], stop_token_ids=(3, 4)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", 3e-38),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("stop", ("",)),
        ("stop", 3),
        ("stop", (1,)),
        ("stop", "a\ud800"),
        ("stop", ["\n", "\udfff"]),
        ("stop", np.zeros((3, 3))),
        ("stop_token_ids", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_named_in_one_line(name, value):
    with pytest.raises(ValueError, match=rf"\b{name} must be .*got ") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**64 - 1])
def test_seed_words_hold_all_64_bits(seed):
    low, high = seed_words(seed)
    assert low + (high << 32) == seed
    assert max(low, high) < 2**32


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_the_coldest_is_greedy_and_the_hottest_is_finite(temperature):
    logits = jnp.asarray([[[-1e8, 1e8, 3.0, 0.99e8]]])
    sampling = SamplingState(
        temperature=jnp.asarray([SamplingParams(temperature=temperature).temperature], jnp.float32),
        top_k=jnp.zeros(1, jnp.int32),
        top_p=jnp.ones(1),
        min_p=jnp.zeros(1),
        seed=jnp.zeros((1, 2), jnp.uint32),
    )
    probabilities = jax.nn.softmax(process_logits(logits, sampling, mode=SamplingMode.TEMPERATURE))
    expected = [0, 1, 0, 0] if temperature < 1 else [0.25] * 4
    np.testing.assert_allclose(probabilities[0, 0], expected, atol=1e-6)


def test_what_32_bits_cannot_hold_is_cut_where_nothing_changes():
    params = SamplingParams(top_k=10**12, top_p=1e-300)
    assert np.int32(params.top_k) == 2**31 - 1
    assert np.float32(params.top_p) > 0


def test_parameters_come_whole_or_as_a_mapping_or_field_by_field():
    expected = SamplingParams(temperature=0.5, stop="\n")
    assert SamplingParams.merge(expected, {}) is expected
    assert SamplingParams.merge({"temperature": 0.5, "stop": "\n"}, {}) == expected
    assert SamplingParams.merge(None, {"temperature": 0.5, "stop": "\n"}) == expected
    assert SamplingParams.merge(None, {}) == SamplingParams.merge({}, {}) == SamplingParams()


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        ({}, {"top_p": 1}, "give top_p in params or as a keyword, not both"),
        (SamplingParams(), {"top_p": 1}, "give top_p in params or as a keyword, not both"),
        ({"temprature": 1}, {}, "unknown sampling parameter 'temprature'; known: temperature, top_k"),
        ({3: 1}, {}, "unknown sampling parameter 3; known: "),
        (None, {"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"top_p": 2}, {}, "top_p must be a number, above 0 and at most 1, got 2"),
        (0.7, {}, "params must be SamplingParams or a mapping of its fields, got 0.7"),
    ],
)
def test_parameters_given_in_another_way_are_named(params, fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.merge(params, fields)
