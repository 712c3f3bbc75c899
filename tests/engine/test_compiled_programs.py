"""What the compiled decode program does with the cache, and with the host."""

import logging
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_text import instructions, num_aliases

from jaxspec.engine.device import step
from jaxspec.engine.device.outcome import read_outcomes
from jaxspec.engine.device.plan import Size, empty_plan, view
from jaxspec.models.layers.transformer import MLP
from jaxspec.sampling import Constraints, SamplingMode

# One layer's cache is larger than every other array of the program, so a copy of it shows by its size.
SIZES = {"num_pages": 400, "steps_per_dispatch": 2}
IN_PLACE = ("scatter", "dynamic-update-slice")


@pytest.fixture(scope="module", params=["ngram", "eagle3", "near", "dspark"])
def engine(request, tiny_engines):
    return tiny_engines.load(request.param, **SIZES)


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.TRUNCATED])
def test_decode_writes_every_cache_in_place(engine, mode):
    assert_in_place(engine, engine.programs.compiled_decode(mode=mode))


def test_a_branch_over_forced_tokens_leaves_every_cache_in_place(tiny_engines):
    engine = tiny_engines.load("eagle3", **SIZES, batch_size=1)
    size = Size(1, 0, SamplingMode.GREEDY, 4, constraints=Constraints.GRAMMAR)
    assert step.num_forced(size)
    engine.core.grammars.prepare()
    engine.programs.compile([size], progress=False)
    assert_in_place(engine, engine.programs.compiled[size])


def assert_in_place(engine, program):
    caches = (*engine.core.state.target_cache, *engine.core.state.draft_cache)
    text = program.as_text()
    assert num_aliases(text) >= len(caches)
    sizes = {cache.size for cache in caches}
    # Instructions that make a new array of a cache's size, in whatever shape.
    made = [
        line
        for line, operation, size in instructions(text)
        if size in sizes
        and operation not in ("parameter", "get-tuple-element", "bitcast", *IN_PLACE)
        and not (operation in ("fusion", "call") and any(name in line for name in IN_PLACE))
    ]
    assert made == []
    smallest = min(cache.nbytes for cache in caches)
    assert program.memory_analysis().temp_size_in_bytes < smallest


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.TRUNCATED])
def test_decode_never_talks_to_the_host(engine, mode):
    text = engine.programs.compiled_decode(mode=mode).as_text()
    for operation in ("infeed", "outfeed", "send(", "recv(", "callback", "copy-start"):
        assert operation not in text, operation


def test_the_loops_over_drafts_and_steps_have_trip_counts_that_xla_knows(tiny_engines):
    text = tiny_engines.load("eagle3", **SIZES).programs.compiled_decode(mode=SamplingMode.GREEDY).as_text()
    counts = re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text)
    assert {"2"} <= set(counts)  # two steps a dispatch; K - 1 = 2 draft steps


def test_a_program_of_several_steps_traces_one(tiny_engines, monkeypatch):
    """Tracing takes about as long as compiling."""
    programs, traced, engine_step = tiny_engines.load("eagle3", **SIZES).programs, [], step.engine_step

    def counted(models, plan, state):
        traced.append(plan.size)
        return engine_step(models, plan, state)

    monkeypatch.setattr(step, "engine_step", counted)
    for size in programs.compiled:
        programs.lowering.lower(size, programs._shape_of_grammars(size))
    assert traced == list(programs.compiled)


ROWS_OF_A_PROMPT = {
    "random eagle3": [16, 2, 2],
    "ngram": [16, 2],
    "near": [16, 2, 18, 2],
    "eagle1": [16, 16, 2],  # it reads the final hidden state of every row
}
"""Rows in the feed-forward network of every layer, target and drafter, when two chunks of 8 are read."""
ROWS_OF_A_STEP = {
    "random eagle3": [12, 12, 3, 3],
    "ngram": [12, 12],
    "near": [12, 12, 3, 3, 15, 3],
    "eagle1": [12, 12, 3, 3],
}
"""When three slots decode with K = 3: verification, a draft step (traced once), the refresh."""


@pytest.mark.parametrize("name", ROWS_OF_A_PROMPT)
def test_the_last_layer_computes_only_what_logits_and_states_need(tiny_engines, name, monkeypatch):
    programs, rows, feed_forward = tiny_engines.load(name, prefill_batch_size=2).programs, [], MLP.__call__

    def counted(self, x):
        rows.append(len(x))
        return feed_forward(self, x)

    monkeypatch.setattr(MLP, "__call__", counted)
    seen = {}
    for size in programs.compiled:
        rows.clear()
        programs.lowering.lower(size, programs._shape_of_grammars(size))
        seen[not size.width] = [*rows]
    assert seen[True] == ROWS_OF_A_PROMPT[name]
    assert sorted(seen[False]) == sorted(ROWS_OF_A_STEP[name])


def run(engine, *, is_active, steps):
    """Runs the decode program on slot 0, active or not, with two tokens left: the steps' tokens, and page 0.

    With None, no slot decodes.
    """
    core, programs = engine.core, engine.programs
    (size,) = (size for size in programs.compiled if size.width and size.mode == SamplingMode.GREEDY)
    words = empty_plan(size, engine.config)
    for name, value in {"slot": 0, "is_decoding": is_active is not None, "steps": steps, "pages": 1}.items():
        view(words, name, size, engine.config)[0] = value
    state = replace(
        jax.tree.map(jnp.zeros_like, core.state),
        active=jnp.zeros_like(core.state.active).at[0].set(bool(is_active)),
        remaining=jnp.full_like(core.state.remaining, 2),
    )
    state, output = programs.enqueue(state, jnp.asarray(words), size=size)
    of_slots, _ = read_outcomes(output)
    return of_slots.num_tokens[:, 0].tolist(), [np.asarray(cache)[0].any() for cache in state.target_cache]


@pytest.mark.cpu
def test_a_dispatch_on_a_cpu_leaves_out_steps_that_are_not_needed(tiny_engines):
    engine = tiny_engines.load("none", steps_per_dispatch=4)
    # Slots without a request write to page 0, so a step that ran shows there.
    assert run(engine, is_active=True, steps=4)[0] == [1, 1, 0, 0]
    assert run(engine, is_active=True, steps=1)[0] == [1, 0, 0, 0]
    assert run(engine, is_active=False, steps=4) == ([0] * 4, [False] * 2)
    # A run that is timed has no requests, and runs all steps.
    assert run(engine, is_active=None, steps=4) == ([0] * 4, [True] * 2)


def test_nothing_compiles_after_loading(engine, caplog):
    prompts = [[1, 2, 3], list(range(20)), [5]]
    engine.generate(prompts, max_new_tokens=6)
    engine.generate(prompts, max_new_tokens=6, temperature=1.0, seed=1)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        engine.generate(prompts, max_new_tokens=9, temperature=0.5, top_k=3, seed=2)
        engine.generate([[4], [6], *prompts], max_new_tokens=7)
    compiled = [record.message for record in caplog.records if "ompiling" in record.message]
    assert compiled == []


def test_one_dispatch_runs_several_steps(tiny_engines, monkeypatch):
    engine = tiny_engines.load("near", **SIZES)
    calls = []
    enqueue = engine.programs.enqueue

    def counted(*args, size):
        calls.extend([1] * bool(size.width))
        return enqueue(*args, size=size)

    monkeypatch.setattr(engine.programs, "enqueue", counted)
    generation = engine.generate([1, 2, 3], max_new_tokens=24)
    # The last dispatch may find the request ended, and one more may be in flight by then.
    dispatches = -(-generation.stats.steps // 2)
    assert dispatches <= len(calls) <= dispatches + 1


def test_the_next_round_is_enqueued_before_the_last_one_is_read(tiny_engines, monkeypatch):
    engine = tiny_engines.load("near", **SIZES)
    core, order = engine.core, []
    for name in ("_enqueue", "_commit"):
        method = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *x, name=name, method=method: order.append(name) or method(*x))
    engine.generate([1, 2, 3], max_new_tokens=24)
    in_flight = [order[:i].count("_enqueue") - order[:i].count("_commit") for i in range(len(order))]
    read = [count for name, count in zip(order, in_flight, strict=True) if name == "_commit"]
    # Only at the end is nothing enqueued behind what is read.
    assert len(read) > 4
    assert min(read[:-2]) >= 2
