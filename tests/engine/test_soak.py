"""Many requests through one engine: nothing grows, and nothing compiles once the background is done."""

import gc
import logging
import random
from pathlib import Path

import jax
import pytest
from tiny_engines import assert_idle, compile_all

from jaxspec import SamplingParams


def resident() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


@pytest.mark.parametrize("requests", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_grows(engines_of, tiny_engines, caplog, requests):
    engine = tiny_engines.load("eagle3", "auto", sampling_modes=("sampled",))
    compile_all(engine)
    rng = random.Random(0)

    def some(count):
        for _ in range(count):
            prompt = [rng.randrange(48) for _ in range(rng.randrange(1, 40))]
            sampled = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.choice([None, 3])}
            params = SamplingParams(max_new_tokens=rng.randrange(1, 30), **sampled)
            yield engine.make_request(prompt, params)

    def held():
        # An idle engine, also one of another test, still times programs, and while one runs, the state that
        # it was given is gone.
        loaded = [each for engines in engines_of.values() for each in engines.loaded.values()]
        assert all(each.wait_prepared(60) for each in loaded)
        gc.collect()
        device = sum(array.nbytes for array in jax.live_arrays())
        objects = len(gc.get_objects())
        return device, objects, resident(), len(engine.programs.compiled)

    warm_up = requests // 10
    assert sum(1 for _ in engine.run(some(warm_up))) == warm_up
    device, objects, memory, compiled = held()
    left = requests - warm_up
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        assert sum(generation.error is None for _, generation in engine.run(some(left))) == left
    said = [record.message for record in caplog.records]
    assert [message for message in said if "ompiling" in message or "failed" in message] == []
    after = held()
    # The last dispatch's arguments are held.
    assert after[0] < device + 10_000
    # Fewer than one for a request.
    assert after[1] - objects < left
    assert after[2] - memory < 16 * 2**20
    assert after[3] == compiled
    assert_idle(engine)
