"""Caches in float16 and in 8 bits beside dense networks in float32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jaxspec_kernels.attention_parts.coded_cache import CodedCache, encode
from tiny_engines import drive_from_python, limit_pages, start_afresh, tokens_of

import jaxspec
from jaxspec import ConfigError

PROMPTS = ["w6 w7 w8 w9 w6 w7 w8", "w20 w21 w20 w21 w20"]
ANY = {"sampling_modes": ("sampled",)}
"""One program for greedy requests and for sampled ones."""
CODED = {"cache_dtype": "float8_e4m3fn", **ANY}


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


def test_drafting_over_a_cache_in_8_bits_changes_no_token_but_the_cache_does(tiny_engines, prompts):
    drafted, plain, wide = (
        tiny_engines.load("near", **CODED),
        tiny_engines.load(**CODED),
        tiny_engines.load("near", **ANY),
    )
    for caches in (drafted.core.state.target_cache, drafted.core.state.draft_cache):
        for cache in caches:
            assert isinstance(cache, CodedCache)
            assert (cache.codes.dtype, cache.exponents.dtype) == (jnp.float8_e4m3fn, jnp.uint8)
    answers = drafted.generate(prompts, max_new_tokens=30)
    assert tokens_of(answers) == tokens_of(plain.generate(prompts, max_new_tokens=30))
    assert tokens_of(answers) != tokens_of(wide.generate(prompts, max_new_tokens=30))
    assert max(rate for answer in answers for rate in answer.stats.acceptance_per_position) > 0.3


def test_rows_in_8_bits_are_those_of_a_wide_cache(tiny_engines):
    """The keys and values of the first layer do not depend on the cache."""
    prompt = list(range(5, 29))
    held = []
    for engine in (tiny_engines.load("near", **ANY), tiny_engines.load("near", **CODED)):
        start_afresh(engine)
        engine.generate(prompt, max_new_tokens=1)
        held.append(engine.core.state.target_cache[0])
    wide, coded = held
    codes, exponents = encode(wide[1:4])
    assert (coded.exponents[1:4] == exponents).mean() > 0.99
    assert (coded.codes[1:4] == codes).mean() > 0.99


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cache_in_8_bits_has_the_answers_of_the_oracle_and_of_any_company(
    tiny_engines, prompts, monkeypatch, temperature
):
    """Host-driven, alone, with its pages taken away, with kept ones, and with NaN wherever nobody wrote."""
    engine = tiny_engines.load("near", **CODED)
    ask = {"max_new_tokens": 30, "temperature": temperature, "seed": 2}
    start_afresh(engine)
    answers = engine.generate(prompts, **ask)
    assert tokens_of(engine.generate(prompts, **ask)) == tokens_of(answers)
    start_afresh(engine)
    assert tokens_of([engine.generate(prompt, **ask) for prompt in prompts]) == tokens_of(answers)
    engine.forget_prefixes()
    assert engine.wait_idle(timeout=60)
    nan = lambda caches: jax.tree.map(lambda layer: jnp.full_like(layer, jnp.nan), caches)  # noqa: E731
    state = engine.core.state
    engine.core.state = replace(
        state, target_cache=nan(state.target_cache), draft_cache=nan(state.draft_cache)
    )
    assert tokens_of(engine.generate(prompts, **ask)) == tokens_of(answers)
    with monkeypatch.context() as patched:
        limit_pages(engine, 13, patched)
        before = engine.core.scheduler.num_preempted
        assert tokens_of(engine.generate(prompts, **ask)) == tokens_of(answers)
        assert engine.core.scheduler.num_preempted > before
        engine.wait_idle(timeout=60)
    with monkeypatch.context() as patched:
        start_afresh(engine)
        ran = drive_from_python(engine, patched)
        by_hand = engine.generate(prompts, **ask)
        assert ran
    assert tokens_of(by_hand) == tokens_of(answers)
    assert [g.stats.accepted_at for g in by_hand] == [g.stats.accepted_at for g in answers]
    start_afresh(engine)


@pytest.mark.parametrize("kind", ["latent", "compressed"])
def test_caches_without_keys_and_values_by_head_are_refused(engines_of, kind):
    with pytest.raises(ConfigError, match=r"engine\.cache_dtype 'float8_e4m3fn' is not supported for "):
        engines_of[kind].load(**CODED)
