"""What the compiled decode program does with the cache, and with the host."""

import logging
import re

import jax
import pytest
from hlo_text import instructions, num_aliases

from jaxspec.engine import step
from jaxspec.sampling import SamplingMode

# One layer's cache is larger than every other array of the program, so a copy of it shows by its size.
SIZES = {"num_pages": 400, "steps_per_dispatch": 2}
IN_PLACE = ("scatter", "dynamic-update-slice")


@pytest.fixture(scope="module", params=["ngram", "eagle3", "near"])
def engine(request, tiny_engines):
    return tiny_engines.load(request.param, **SIZES)


@pytest.mark.parametrize("mode", [SamplingMode.GREEDY, SamplingMode.TRUNCATED])
def test_decode_writes_every_cache_in_place(engine, mode):
    program = engine.programs.compiled_decode(mode=mode)
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

    def counted(*args, **kwargs):
        traced.append(kwargs["mode"])
        return engine_step(*args, **kwargs)

    monkeypatch.setattr(step, "engine_step", counted)
    for size in programs.compiled:
        programs._lower(size)
    assert traced == [size.mode for size in programs.compiled]


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
    dispatch = engine.programs.dispatch

    def counted(*args, size):
        calls.extend([1] * (size.mode is not None))
        return dispatch(*args, size=size)

    monkeypatch.setattr(engine.programs, "dispatch", counted)
    generation = engine.generate([1, 2, 3], max_new_tokens=24)
    # The last dispatch may find the request ended, and one more may be in flight by then.
    dispatches = -(-generation.stats.steps // 2)
    assert dispatches <= len(calls) <= dispatches + 1


def test_the_next_round_is_enqueued_before_the_last_one_is_read(tiny_engines, monkeypatch):
    engine = tiny_engines.load("near", **SIZES)
    core, order = engine.core, []
    for name in ("_dispatch", "_commit"):
        method = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *x, name=name, method=method: order.append(name) or method(*x))
    engine.generate([1, 2, 3], max_new_tokens=24)
    in_flight = [order[:i].count("_dispatch") - order[:i].count("_commit") for i in range(len(order))]
    read = [count for name, count in zip(order, in_flight, strict=True) if name == "_commit"]
    # Only at the end is nothing enqueued behind what is read.
    assert len(read) > 4
    assert min(read[:-2]) >= 2
