"""Windows of listed slots and compressed entries in the engine: nothing stale is read, nothing is copied."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hlo_text import instructions, num_aliases
from tiny_engines import tokens_of

from jaxspec.engine.device.plan import Plan
from jaxspec.sampling import SamplingMode


@pytest.fixture(scope="module")
def engine(engines_of):
    """One request at a time, drafted by a noisy copy; its caches are larger than all other arrays.

    A draft step then writes a single row, and that is the write that XLA would fuse into the read after it.
    """
    return engines_of["indexed window"].load(
        "near", 5, sampling_modes=("greedy",), batch_size=1, num_pages=800
    )


def poison_from(cache, page_table, lengths, page_size):
    """NaN in page 0, in positions from each slot's length on, and in entries that such are part of."""

    def fill(array):
        entries = array.shape[3]
        at = jnp.arange(page_table.shape[1] * entries)
        is_past = (at + 1) * (page_size // entries) > lengths[:, None]
        page = jnp.where(is_past, page_table[:, at // entries], 0)
        return array.at[page, :, :, at % entries].set(jnp.nan)

    return jax.tree.map(fill, cache)


def test_nan_at_rejected_positions_and_in_their_entries_changes_nothing(engine, prompts, monkeypatch):
    clean = tokens_of(engine.generate(prompts, max_new_tokens=30))
    enqueue = engine.programs.enqueue

    def poisoned_enqueue(state, words, *, size):
        state, output = enqueue(state, words, size=size)
        if not size.width:
            return state, output
        # The pages of a slot that is done may be another's by now.
        table = Plan.unpack(words, size, engine.config).page_table.pages
        length = jnp.where(state.active, state.length, 10**6)
        # A draft model has read the last token itself: one position more than the target.
        target_cache = poison_from(state.target_cache, table, length, 8)
        draft_cache = poison_from(state.draft_cache, table, length + 1, 8)
        return replace(state, target_cache=target_cache, draft_cache=draft_cache), output

    engine.forget_prefixes()  # what is poisoned below may not be read again
    everywhere = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), engine.core.state.target_cache)
    engine.core.state = replace(
        engine.core.state, target_cache=everywhere, draft_cache=jax.tree.map(jnp.copy, everywhere)
    )
    monkeypatch.setattr(engine.programs, "enqueue", poisoned_enqueue)
    poisoned = engine.generate(prompts, max_new_tokens=30)
    assert tokens_of(poisoned) == clean
    drafted = sum(answer.stats.drafted for answer in poisoned)
    assert 0 < sum(answer.stats.accepted for answer in poisoned) < drafted  # some were rejected


def test_every_array_of_the_cache_is_written_in_place(engine):
    program = engine.programs.compiled_decode(mode=SamplingMode.GREEDY)
    text = program.as_text()
    caches = jax.tree.leaves((engine.core.state.target_cache, engine.core.state.draft_cache))
    assert num_aliases(text) >= len(caches) == 8
    sizes = {cache.size for cache in caches}
    made = [
        line
        for line, operation, size in instructions(text)
        if size in sizes and operation in ("copy", "transpose", "copy-start", "concatenate", "pad")
    ]
    assert made == []
    smallest = min(cache.nbytes for cache in caches)
    assert program.memory_analysis().temp_size_in_bytes < smallest
