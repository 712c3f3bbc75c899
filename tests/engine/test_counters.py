"""What an engine counts of its work."""

import pytest
from programs_when_run import compile_now


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_counts_are_those_of_the_answers(tiny_engines, prompts, name):
    engine = tiny_engines.load(name, 3, steps_per_dispatch=2)
    compile_now(engine.programs)
    engine.forget_prefixes()
    before = engine.counters
    answers = engine.generate(prompts, max_new_tokens=11)
    work = engine.counters.since(before)
    assert work.prompt_rows_used == sum(map(len, prompts))
    assert work.prompt_rows >= work.prompt_rows_used
    assert work.slot_steps_used == sum(answer.stats.steps for answer in answers)
    # Seven answers in three slots: some slot is without work at the end.
    assert work.slot_steps > work.slot_steps_used
    assert work.slot_steps <= engine.config.batch_size * work.steps
    assert work.compiles == 0
    assert engine.counters.compiles == len(engine.programs.compiled)


def test_prompts_alone_are_no_steps(tiny_engines):
    engine = tiny_engines.load("none")
    before = engine.counters
    engine.generate([[1, 2, 3]], max_new_tokens=1)
    work = engine.counters.since(before)
    assert (work.steps, work.slot_steps, work.slot_steps_used) == (0, 0, 0)
    assert work.prompt_passes == work.dispatches == 1
