"""Caches in float16 beside dense networks in float32."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec

PROMPTS = ["w6 w7 w8 w9 w6 w7 w8", "w20 w21 w20 w21 w20"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="float16 caches are for CPUs")
def test_drafting_changes_no_token_over_a_cache_in_float16(tiny_config):
    answers = []
    for drafter in ({"kind": "none"}, {"kind": "ngram"}):
        engine = jaxspec.load(tiny_config, drafter=drafter, cache_dtype="float16", progress=False)
        assert {cache.dtype for cache in engine.core.state.target_cache} == {jnp.dtype("float16")}
        answers.append(engine.generate(PROMPTS, max_new_tokens=80, ignore_eos=True))
        assert engine.config.dtype == "float32"
    plain, drafted = answers
    assert [answer.token_ids for answer in plain] == [answer.token_ids for answer in drafted]
    assert max(rate for answer in drafted for rate in answer.stats.acceptance_per_position) > 0
