"""Many requests through one engine: nothing grows, and nothing compiles once the background is done."""

import gc
import random
from pathlib import Path

import jax
import pytest
from tiny_engines import assert_idle

from jaxspec import SamplingParams


def resident() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


@pytest.mark.parametrize(
    ("name", "requests"),
    [("eagle3", 120), pytest.param("eagle3", 2000, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_nothing_grows(tiny_engines, name, requests):
    engine = tiny_engines.load(name, "auto", slot_sizes=(1,))
    engine.programs.wait_compiled()
    rng = random.Random(0)

    def some(count):
        for _ in range(count):
            prompt = [rng.randrange(48) for _ in range(rng.randrange(1, 40))]
            sampled = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.choice([None, 3])}
            params = SamplingParams(max_new_tokens=rng.randrange(1, 30), **sampled)
            yield engine.make_request(prompt, params)

    def held():
        assert engine.wait_idle(60)
        gc.collect()
        device = sum(array.nbytes for array in jax.live_arrays())
        objects = len(gc.get_objects())
        return device, objects, resident(), len(engine.programs.compiled)

    warm_up = requests // 10
    assert sum(1 for _ in engine.run(some(warm_up))) == warm_up
    device, objects, memory, compiled = held()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax._src.compiler, "compile_or_get_cached", None)  # a compilation would raise
        left = requests - warm_up
        assert sum(generation.error is None for _, generation in engine.run(some(left))) == left
    after = held()
    assert after[0] <= device
    # Keys of pages that are kept, at most a handful each.
    assert after[1] - objects < 20 * engine.config.num_pages
    assert after[2] - memory < 16 * 2**20
    assert after[3] == compiled
    assert_idle(engine)
