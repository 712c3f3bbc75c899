"""Programs of several sizes, prompts beside answers, and pages that run out: the tokens of a lone run."""

from collections import Counter
from dataclasses import replace

import pytest
from tiny_engines import limit_pages, tokens_of

from jaxspec.engine.device.programs import Size
from jaxspec.engine.rounds import core
from jaxspec.sampling import SamplingMode

pytestmark = pytest.mark.usefixtures("compiled_behind")
WAYS = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 11}}
NAMES = ("none", "eagle3")
SIZES = {
    "batch_size": 4,
    "slot_sizes": (1,),
    "prefill_batch_size": 3,
    "mixed_prefill_tokens": 8,
    "steps_per_dispatch": 2,
}


@pytest.fixture(params=NAMES, scope="module")
def name(request):
    return request.param


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


@pytest.fixture
def alone(tiny_engines, prompts, name, way):
    engine = tiny_engines.load(name, batch_size=1)
    return [engine.generate(prompt, max_new_tokens=30, **way).token_ids for prompt in prompts]


def ran(engine, monkeypatch):
    """The sizes of the programs that run from now on."""
    sizes = set()
    enqueue = engine.programs.enqueue
    monkeypatch.setattr(
        engine.programs, "enqueue", lambda *args, size: sizes.add(size) or enqueue(*args, size=size)
    )
    return sizes


def test_a_program_serves_what_is_no_larger_than_itself():
    size = Size(4, 2, SamplingMode.TEMPERATURE, 3)
    smaller = [size, Size(3, 1, SamplingMode.GREEDY, 2)]
    larger = [
        replace(size, **more)
        for more in ({"slots": 5}, {"chunks": 3}, {"mode": SamplingMode.TRUNCATED}, {"width": 4})
    ]
    other = [replace(size, chunks=0), replace(size, width=0)]
    assert all(size.serves(need) for need in smaller)
    assert not any(size.serves(need) for need in [*larger, *other])


def test_every_size_gives_the_tokens_of_a_lone_run(tiny_engines, prompts, name, way, alone, monkeypatch):
    engine = tiny_engines.load(name, **SIZES)
    engine.programs.wait_compiled()
    sizes = ran(engine, monkeypatch)
    params = [{"max_new_tokens": 30, **way}] * len(prompts) * 2
    assert tokens_of(engine.generate(prompts * 2, params)) == alone * 2
    assert tokens_of([engine.generate(prompt, max_new_tokens=30, **way) for prompt in prompts]) == alone
    kinds = {(size.slots, size.width > 0, size.chunks > 0) for size in sizes}
    assert kinds >= {(4, True, False), (4, True, True), (1, True, False), (1, False, True), (3, False, True)}


def test_before_the_smaller_ones_are_there_the_largest_serve(tiny_engines, prompts, name, way, alone):
    engine = tiny_engines.load(name, **SIZES)
    engine.programs.wait_compiled()
    everything = dict(engine.programs.compiled)
    largest = {size: program for size, program in everything.items() if size.slots == 4 and not size.chunks}
    largest |= {size: program for size, program in everything.items() if size.chunks == 3}
    engine.programs.compiled = largest
    try:
        assert tokens_of(engine.generate(prompts, max_new_tokens=30, **way)) == alone
    finally:
        engine.programs.compiled = everything


def test_pages_that_run_out_cost_no_token(tiny_engines, prompts, name, way, alone, monkeypatch):
    """The pool holds the longest request and little more."""
    engine = tiny_engines.load(name, **SIZES)
    limit_pages(engine, 9, monkeypatch)
    before = engine.core.scheduler.num_preempted
    assert tokens_of(engine.generate(prompts, max_new_tokens=30, **way)) == alone
    assert engine.core.scheduler.num_preempted > before


def test_nobody_waits_for_the_slow_first_runs(tiny_engines, prompts, name, way, alone, monkeypatch):
    engine = tiny_engines.load(name, **SIZES)
    engine.programs.wait_compiled()
    sizes = set(engine.programs.compiled)
    times, enqueue = Counter(), engine.programs.enqueue

    def counted(*args, size):
        times[size] += 1
        return enqueue(*args, size=size)

    monkeypatch.setattr(engine.programs, "enqueue", counted)
    monkeypatch.setattr(engine.core, "_warm", set())
    monkeypatch.setattr(core, "_needs_warming", lambda: True)
    assert engine.wait_prepared(60)
    assert times == dict.fromkeys(sizes, 2)
    assert tokens_of(engine.generate(prompts, max_new_tokens=30, **way)) == alone
    assert sum(times.values()) > 2 * len(sizes)
