import math

import numpy as np
import pytest

from jaxspec.sampling import SamplingParams, seed_words


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
