"""Windows of listed slots and compressed entries in the engine: nothing stale is read, nothing is copied."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hlo_text import instructions, num_aliases
from tiny_engines import limit_pages, start_afresh, tokens_of

from jaxspec.engine.device.plan import Plan
from jaxspec.sampling import SamplingMode

AHEAD = {"near": 1, "mtp": 0}
"""Drafters, and how many positions more than the target they have read: a draft model the last token."""


@pytest.fixture(scope="module", params=AHEAD)
def drafter(request):
    return request.param


@pytest.fixture(scope="module")
def engine(engines_of, drafter):
    """One request at a time; its caches are larger than all other arrays.

    A draft step then writes a single row, and that is the write that XLA would fuse into the read after it.
    """
    return engines_of["compressed"].load(drafter, 5, sampling_modes=("greedy",), batch_size=1, num_pages=4000)


def poison_from(cache, shapes, page_table, lengths, page_size):
    """NaN in page 0, in positions from each slot's length on, and in entries that such are part of."""

    def fill(shape, array):
        ratio = shape.positions_per_entry
        end = jnp.arange(ratio - 1, page_table.shape[1] * page_size, ratio)
        page = jnp.where(end >= lengths[:, None], page_table[:, end // page_size], 0)
        array = array.at[page, :, :, end % page_size // ratio].set(jnp.nan)
        return array.at[0].set(jnp.nan)

    return jax.tree.map(fill, shapes, cache)


@pytest.fixture(scope="module")
def plain(engines_of, prompts):
    """Plain decoding's answers."""
    engine = engines_of["compressed"].load(sampling_modes=("greedy",))
    return tokens_of(engine.generate(prompts, max_new_tokens=40))


def test_nan_at_rejected_positions_and_in_their_entries_changes_nothing(
    engine, drafter, prompts, plain, monkeypatch
):
    clean = tokens_of(engine.generate(prompts, max_new_tokens=40))
    assert clean == plain
    enqueue = engine.programs.enqueue

    @partial(jax.jit, static_argnames="size")
    def poisoned_state(state, words, size):
        # The pages of a slot that is done may be another's by now.
        table = Plan.unpack(words, size, engine.config).page_table.pages
        length = jnp.where(state.active, state.length, 10**6)
        target_cache = poison_from(state.target_cache, engine.target.cache_shapes, table, length, 8)
        draft_cache = poison_from(
            state.draft_cache, engine.drafter.cache_shapes, table, length + AHEAD[drafter], 8
        )
        return replace(state, target_cache=target_cache, draft_cache=draft_cache)

    def poisoned_enqueue(state, words, *, size):
        state, output = enqueue(state, words, size=size)
        return (poisoned_state(state, words, size) if size.width else state), output

    engine.forget_prefixes()  # what is poisoned below may not be read again
    state = engine.core.state
    nowhere = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.target_cache, state.draft_cache))
    engine.core.state = replace(state, target_cache=nowhere[0], draft_cache=nowhere[1])
    monkeypatch.setattr(engine.programs, "enqueue", poisoned_enqueue)
    poisoned = engine.generate(prompts, max_new_tokens=40)
    assert tokens_of(poisoned) == clean
    drafted = sum(answer.stats.drafted for answer in poisoned)
    assert 0 < sum(answer.stats.accepted for answer in poisoned) < drafted  # some were rejected


def test_every_array_of_the_cache_is_written_in_place(engine):
    program = engine.programs.compiled_decode(mode=SamplingMode.GREEDY)
    text = program.as_text()
    caches = jax.tree.leaves((engine.core.state.target_cache, engine.core.state.draft_cache))
    assert num_aliases(text) >= len(caches) >= 8
    sizes = {cache.size for cache in caches}
    made = [
        line
        for line, operation, size in instructions(text)
        if size in sizes and operation in ("copy", "transpose", "copy-start", "concatenate", "pad")
    ]
    assert made == []
    smallest = min(cache.nbytes for cache in caches)
    assert program.memory_analysis().temp_size_in_bytes < smallest


def test_a_request_that_was_put_back_goes_on_with_the_same_tokens(engines_of, prompts, monkeypatch):
    engine = engines_of["compressed"].load("mtp", 1, sampling_modes=("greedy",))
    start_afresh(engine)
    alone = [tokens_of([engine.generate(prompt, max_new_tokens=40)]) for prompt in prompts[:3]]
    limit_pages(engine, 12, monkeypatch)
    before = engine.core.scheduler.num_preempted
    together = engine.generate(prompts[:3], max_new_tokens=40)
    assert [[each] for each in tokens_of(together)] == alone
    assert engine.core.scheduler.num_preempted > before


def test_any_number_of_drafts_gives_the_tokens_of_plain_decoding(engines_of, prompts, plain):
    """More than two made vLLM crash (docs/stale-metadata.md). Five are above, and seven in test_pairs.py."""
    engine = engines_of["compressed"].load("mtp", 1, sampling_modes=("greedy",))
    drafted = engine.generate(prompts, max_new_tokens=40)
    assert tokens_of(drafted) == plain
    assert sum(answer.stats.accepted for answer in drafted) > 0
