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
        ("seed", 1.5),
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
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("logit_bias", 3),
        ("logit_bias", [5]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}),
        ("bad_words", 3),
        ("bad_words", [3]),
        ("bad_words", ["a", ""]),
        ("bad_words", [[-1]]),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("no_repeat_ngram_size", 17),
        ("no_repeat_ngram_size", -1),
    ],
)
def test_a_bad_value_is_named_in_one_line(name, value):
    with pytest.raises(ValueError, match=rf"\b{name} must be .*got ") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be a number, -100 to 100, got 101"),
        ({"logit_bias": [(5, 1), ("5", 2)]}, "logit_bias: token 5 is given twice"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias: at most 300 tokens, got 301"),
        ({"bad_words": [[]]}, "bad_words: a sequence has 1 to 16 tokens, got 0"),
        ({"bad_words": [[1] * 17]}, "bad_words: a sequence has 1 to 16 tokens, got 17"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens must be at most max_new_tokens, 8, got 9"),
    ],
)
def test_what_no_program_has_room_for_is_named(asked, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        SamplingParams(**asked)


def test_biases_and_words_come_in_every_form_and_are_kept_in_one():
    params = SamplingParams(logit_bias={"7": 1, np.int64(8): -2.5}, bad_words=["a", [np.int32(3), 4]])
    assert params.logit_bias == ((7, 1.0), (8, -2.5))
    assert params.bad_words == ("a", (3, 4))
    assert SamplingParams(bad_words="a").bad_words == ("a",)
    again = SamplingParams(logit_bias=params.logit_bias, bad_words=params.bad_words)
    assert again == params
    assert hash(again) == hash(params)


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
        ({"temprature": 1}, {}, "'temprature'; did you mean 'temperature'"),
        ({3: 1}, {}, "unknown sampling parameter 3; known: "),
        (None, {"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"top_p": 2}, {}, "top_p must be a number, above 0 and at most 1, got 2"),
        (0.7, {}, "params must be SamplingParams or a mapping of its fields, got 0.7"),
    ],
)
def test_parameters_given_in_another_way_are_named(params, fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.merge(params, fields)
