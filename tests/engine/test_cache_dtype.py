"""Caches in float16 beside networks in float32."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.config import ConfigError, EngineConfig

PROMPTS = ["w6 w7 w8 w9 w6 w7 w8", "w20 w21 w20 w21 w20"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="float16 caches are for CPUs")
def test_drafting_changes_no_token_over_a_cache_in_float16(tiny_config):
    answers = []
    for drafter in ({"kind": "none"}, {"kind": "ngram"}):
        engine = jaxspec.load(tiny_config, drafter=drafter, cache_dtype="float16", progress=False)
        assert {cache.dtype for cache in engine.core.state.target_cache} == {jnp.dtype("float16")}
        answers.append([answer.token_ids for answer in engine.generate(PROMPTS, max_new_tokens=24)])
        assert engine.config.dtype == "float32"
    assert answers[0] == answers[1]


def test_a_cache_has_the_dtype_of_the_network_unless_it_is_set():
    def resolved(backend, **fields):
        return EngineConfig(**fields).resolve(backend=backend, model_limit=128).cache_dtype

    assert resolved("cpu") == "float32"
    assert resolved("gpu") == "bfloat16"
    assert resolved("cpu", cache_dtype="float16") == "float16"
    for backend, fields in (
        ("gpu", {"cache_dtype": "float16"}),
        ("cpu", {"cache_dtype": "bfloat16"}),
        ("cpu", {"cache_dtype": "float16", "dtype": "bfloat16"}),
    ):
        with pytest.raises(ConfigError, match=r"engine\.cache_dtype is"):
            resolved(backend, **fields)
    with pytest.raises(ConfigError, match=r"engine\.cache_dtype must be"):
        EngineConfig(cache_dtype="int8")
