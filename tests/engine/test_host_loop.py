"""The draft loop driven from Python is the oracle of the compiled one."""

import numpy as np
import pytest
from tiny_engines import start_afresh

CASES = [
    ("ngram", 3),
    ("eagle3", 3),
    ("eagle3", 1),
    ("eagle1", 5),
    ("near", 3),
    ("peagle", 7),
    ("dflash", 7),
]


@pytest.mark.parametrize(("name", "k"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_compiled_loop_drafts_what_the_host_driven_one_does(tiny_engines, prompts, name, k, temperature):
    mode = "sampled" if temperature else "greedy"
    results = []
    for draft_loop in ("compiled", "host"):
        engine = tiny_engines.load(name, k, draft_loop=draft_loop, sampling_modes=(mode,))
        start_afresh(engine)
        generations = engine.generate(prompts, max_new_tokens=24, temperature=temperature, seed=5)
        caches = [np.asarray(cache) for cache in (*engine._state.target_cache, *engine._state.draft_cache)]
        results.append(([(g.token_ids, g.stats.accepted_at) for g in generations], caches))
    (compiled, compiled_caches), (host, host_caches) = results
    assert compiled == host
    assert len(compiled_caches) > 0
    for one, other in zip(compiled_caches, host_caches, strict=True):
        # Page 0 is nobody's: rows that are not kept may land there in any order. The programs are
        # compiled apart, so XLA may fuse a sum otherwise and round its last bit.
        np.testing.assert_allclose(one[1:], other[1:], rtol=0, atol=2e-5)
