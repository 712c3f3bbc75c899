"""What must not be read is filled with NaN, and nothing changes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiny_engines import ONCE, tokens_of

from jaxspec.engine.device.plan import Plan


def poison(engine):
    """Fills every page with NaN that is not kept: free pages, page 0, and what old requests left."""
    kept = jnp.asarray(sorted(engine.core.scheduler.pages._keys), jnp.int32)

    def fill(cache):
        return jax.tree.map(lambda layer: jnp.full_like(layer, jnp.nan).at[kept].set(layer[kept]), cache)

    state = engine.core.state
    engine.core.state = replace(
        state, target_cache=fill(state.target_cache), draft_cache=fill(state.draft_cache)
    )


@pytest.mark.parametrize(
    "name", ["ngram", "bigram", "eagle3", "eagle1", "near", "peagle", "dflash"], scope="module"
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_pages_that_nobody_wrote_changes_nothing(tiny_engines, prompts, name, temperature):
    engine = tiny_engines.load(name)
    ask = {"max_new_tokens": 30, "temperature": temperature, "seed": 2}
    clean = engine.generate(prompts, **ask)
    for is_cached in (False, True):
        if not is_cached:
            engine.forget_prefixes()
            engine.wait_idle()
        poison(engine)
        poisoned = engine.generate(prompts, **ask)
        assert any(g.cached_tokens for g in poisoned) == is_cached
        assert tokens_of(poisoned) == tokens_of(clean)
        assert [g.stats.accepted_at for g in poisoned] == [g.stats.accepted_at for g in clean]
    engine.forget_prefixes()
    engine.wait_idle()
    poison(engine)  # leave no finite page behind that another test could lean on


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("eagle3", 0), ("eagle1", 0), ("near", 1), ("peagle", 0), ("gemma4_assistant", 0), ("dflash", 0)],
)
def test_nan_at_rejected_positions_changes_nothing(engines_of, prompts, name, ahead, monkeypatch):
    """After every step all that lies past the committed tokens of each slot is poisoned, and page 0.

    `ahead`: positions that the drafter has cached beyond the target. EAGLE's last row pairs the last token
    with the position before it, and DFlash keeps none for the last token; a draft model has read it.
    """
    engine = engines_of[ONCE[name]].load(name, batch_size=1, sampling_modes=("greedy",))
    clean = engine.generate(prompts, max_new_tokens=30)
    engine.forget_prefixes()
    enqueue = engine.programs.enqueue

    @partial(jax.jit, static_argnames="size")
    def poisoned(state, words, size):
        page_size = state.target_cache[0].shape[3]
        table = Plan.unpack(words, size, engine.config).page_table.pages[0]
        position = jnp.arange(table.size * page_size)

        def fill(cache, length):
            page = jnp.where(position >= length, table[position // page_size], 0)
            return jax.tree.map(lambda layer: layer.at[page, :, :, position % page_size].set(jnp.nan), cache)

        length = state.length[0]
        return replace(
            state,
            target_cache=fill(state.target_cache, length),
            draft_cache=fill(state.draft_cache, length + ahead),
        )

    def poisoned_enqueue(state, words, *, size):
        state, output = enqueue(state, words, size=size)
        return (poisoned(state, words, size) if size.width else state), output

    monkeypatch.setattr(engine.programs, "enqueue", poisoned_enqueue)
    after = engine.generate(prompts, max_new_tokens=30)
    assert tokens_of(after) == tokens_of(clean)
    # NaN that a drafter reads costs no token, but its drafts.
    assert [g.stats.accepted_at for g in after] == [g.stats.accepted_at for g in clean]
