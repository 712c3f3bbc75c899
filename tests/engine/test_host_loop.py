"""The draft loop driven from Python is the oracle of the compiled one: each kind of attention, each drafter.

Pages hold eight positions and windows see six, so seven drafts cross the edges of both.
"""

import jax
import numpy as np
import pytest
from tiny_engines import DRAFTERS, PAIRS, start_afresh

from jaxspec import SamplingParams


def answers_and_caches(engine, prompts, *, temperatures):
    """Tokens and acceptance by request, and all caches; requests take the temperatures in turn."""
    start_afresh(engine)
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperatures[i % len(temperatures)], seed=i)
        for i in range(len(prompts))
    ]
    requests = [engine.make_request(*request) for request in zip(prompts, params, strict=True)]
    answers = {i: (answer.token_ids, answer.stats.accepted_at) for i, answer in engine.run(requests)}
    caches = jax.tree.leaves((engine._state.target_cache, engine._state.draft_cache))
    return answers, [np.asarray(cache) for cache in caches]


def assert_same(compiled, host):
    (answers, caches), (host_answers, host_caches) = compiled, host
    assert answers == host_answers
    assert sum(sum(accepted_at) for _, accepted_at in answers.values()) > 0
    for one, other in zip(caches, host_caches, strict=True):
        # Page 0 is nobody's: rows that are not kept may land there in any order. The programs are
        # compiled apart, so XLA may fuse a sum otherwise and round its last bit.
        np.testing.assert_allclose(one[1:], other[1:], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_the_compiled_loop_drafts_what_the_host_driven_one_does(engines_of, prompts, kind, name, monkeypatch):
    """Greedy requests beside sampled ones."""
    engine = engines_of[kind].load(name, DRAFTERS[name], sampling_modes=("sampled",))
    compiled = answers_and_caches(engine, prompts, temperatures=[0.0, 1.0])
    # An engine loaded with draft_loop="host" does the same and compiles prefill a second time.
    programs = engine.programs
    monkeypatch.setitem(programs._decode, True, programs._host_decode(True))
    assert_same(compiled, answers_and_caches(engine, prompts, temperatures=[0.0, 1.0]))


@pytest.mark.parametrize(("kind", "name", "k"), [("full", "eagle3", 1), ("full", "near", 3)])
def test_greedy_programs_do_so_too_and_the_loop_is_an_option_of_loading(engines_of, prompts, kind, name, k):
    engines = [
        engines_of[kind].load(name, k, sampling_modes=("greedy",), draft_loop=draft_loop)
        for draft_loop in ("compiled", "host")
    ]
    assert_same(*(answers_and_caches(engine, prompts, temperatures=[0.0]) for engine in engines))
