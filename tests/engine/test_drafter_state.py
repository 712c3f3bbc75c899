"""What a drafter keeps between steps, and what the cache keeps of a request near its end."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from tiny_engines import start_afresh

from jaxspec.engine.device.plan import Plan, pack
from jaxspec.engine.rounds import core

ALONE = {"batch_size": 1, "sampling_modes": ("greedy",)}
WITH_CACHE = ("eagle3", "eagle1", "near", "peagle", "dflash")


@pytest.fixture
def packed(monkeypatch):
    """The plans of all dispatches."""
    plans = []

    def recorded(dispatch, size, config):
        words = pack(dispatch, size, config)
        plans.append(Plan.unpack(jnp.asarray(words), size, config))
        return words

    monkeypatch.setattr(core, "pack", recorded)
    return plans


def cached(engine, packed, count):
    """What is cached of the first `count` positions of the last dispatch's first slot, entries that end there
    included, one array for each of target and drafter."""
    state = engine.core.state
    page_size = engine.config.page_size
    pages = np.asarray(packed[-1].page_table.pages[0])
    shapes = jax.tree.leaves((engine.target.cache_shapes, engine.drafter.cache_shapes))
    found = []
    for shape, array in zip(shapes, jax.tree.leaves((state.target_cache, state.draft_cache)), strict=True):
        ratio = shape.positions_per_entry
        end = np.arange(ratio - 1, count, ratio)
        page = pages[end // page_size]
        assert (page > 0).all()
        found.append(np.asarray(array)[page, :, :, end % page_size // ratio])
    return found


PAIRS = [
    *(("full", name) for name in WITH_CACHE),
    ("latent", "mtp"),
    ("compressed", "mtp"),
]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_after_decoding_the_cache_holds_what_prefilling_the_text_would_have_put_there(
    engines_of, prompts, packed, kind, name
):
    """Also the drafter's part: entries that its own drafts left are made again from the target's states."""
    engine = engines_of[kind].load(name, **ALONE)
    accepted = 0
    for prompt in prompts:
        generation = engine.generate(prompt, max_new_tokens=30)
        accepted += generation.stats.accepted
        text = [*prompt, *generation.token_ids]
        decoded = cached(engine, packed, len(text) - 1)
        engine.forget_prefixes()
        (last,) = engine.generate(text[:-1], max_new_tokens=1).token_ids
        assert last == text[-1]
        for one, other in zip(decoded, cached(engine, packed, len(text) - 1), strict=True):
            assert_close(one, other)
    assert accepted > 5


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_target_that_drafts_for_itself_has_everything_accepted(tiny_engines, prompts, k, temperature):
    """Sampled too: the drafts' distribution is the target's, so the ratio is 1 and no draft can fail."""
    engine = tiny_engines.load("self", k)
    for generation in engine.generate(prompts, max_new_tokens=33, temperature=temperature, seed=7):
        stats = generation.stats
        assert stats.accepted == stats.drafted == k * stats.steps > 0
        assert stats.acceptance_length == k + 1
        assert stats.acceptance_per_position == [1.0] * k
        # One token comes from prefill; only the limit can cut the last block short.
        assert stats.steps == -(-32 // (k + 1))


@pytest.mark.parametrize("name", ["ngram", "bigram", *WITH_CACHE], scope="module")
def test_drafts_past_the_end_of_a_request_write_into_no_page_but_its_own(tiny_engines, name):
    engine = tiny_engines.load(name, **ALONE)
    start_afresh(engine)
    state = engine.core.state
    fill = lambda layer: jnp.full_like(layer, 7.0)  # noqa: E731
    engine.core.state = replace(
        state,
        target_cache=jax.tree.map(fill, state.target_cache),
        draft_cache=jax.tree.map(fill, state.draft_cache),
    )
    engine.generate([5, 6, 5, 6, 5], max_new_tokens=11)  # 16 positions: pages 1 and 2, to the last place
    for layer in (*engine.core.state.target_cache, *engine.core.state.draft_cache):
        untouched = (np.asarray(layer) == 7.0).all(axis=(1, 2, 3, 4))
        assert np.flatnonzero(~untouched).tolist() in ([1, 2], [0, 1, 2])
    start_afresh(engine)


@pytest.mark.parametrize("name", ["ngram", "bigram", *WITH_CACHE], scope="module")
def test_the_models_limit_ends_an_answer_as_in_plain_decoding(tiny_engines, name):
    plain, engine = tiny_engines.load(), tiny_engines.load(name, **ALONE)
    for length in (88, 93, 95):
        prompt = (np.arange(length) * 5 % 48).tolist()
        expected = plain.generate(prompt)
        generation = engine.generate(prompt)
        assert generation.token_ids == expected.token_ids
        assert len(generation.token_ids) == 96 - length
        assert generation.finish_reason == expected.finish_reason == "length"
