"""Acceptance of several sets, temperatures and seeds, all answered in one run."""

import numpy as np
import pytest
from tiny_engines import TinyEngines

from jaxspec.config import ConfigError
from jaxspec.engine import AcceptanceStats
from jaxspec.lab.training.config import EvaluateConfig
from jaxspec.lab.training.evaluate import comparison, length_interval, measure
from jaxspec.sampling import SamplingParams

SETS = {"one": [[6, 7, 6, 7, 6], [8, 9, 8]], "two": [[11, 12, 11, 12, 11, 12]]}


def test_every_answer_counts_for_its_own_set_temperature_and_seed(tmp_path):
    engine = TinyEngines(tmp_path).load("near", sampling_modes=("sampled",))
    config = EvaluateConfig(temperatures=(0.0, 1.0), seeds=(3, 4), max_new_tokens=40)
    accepted = 0
    found = measure(engine, SETS, config)
    for name, prompts in SETS.items():
        for temperature, seeds in ((0.0, (3,)), (1.0, (3, 4))):
            by_seed, tokens = [], 0
            for seed in seeds:
                stats = AcceptanceStats()
                params = SamplingParams(temperature=temperature, max_new_tokens=40, seed=seed)
                for answer in engine.generate(prompts, params):
                    stats.add(answer.stats)
                    tokens += len(answer.token_ids)
                by_seed.append(stats)
            result = found.pop(f"{name} temperature {temperature:g}")
            assert result["acceptance_length_by_seed"] == [stats.acceptance_length for stats in by_seed]
            assert [sum(of) for of in zip(*result["by_prompt"], strict=True)] == [
                result["accepted"],
                result["draft_steps"],
            ]
            assert result["acceptance_length_interval"] == length_interval(result["by_prompt"])
            assert result["steps"] == sum(stats.steps for stats in by_seed)
            assert result["accepted"] == sum(stats.accepted for stats in by_seed)
            assert (result["prompts"], result["tokens"]) == (len(prompts), tokens)
            accepted += result["accepted"]
    assert accepted
    assert not found


def test_intervals_over_prompts_hold_the_truth_as_often_as_they_say():
    """Of prompts that differ, and of two heads whose difference is smaller than that between prompts."""
    rng = np.random.default_rng(0)
    missed, repeats, truth = np.zeros(2), 500, 2.0

    def result(chance, steps):
        counts = list(zip(rng.binomial(4 * steps, chance / 4).tolist(), steps.tolist(), strict=True))
        accepted, passes = np.sum(counts, axis=0)
        length, interval = 1 + accepted / passes, length_interval(counts)
        return {
            "by_prompt": counts,
            "prompts": len(counts),
            "acceptance_length": length,
            "acceptance_length_interval": interval,
        }

    for _ in range(repeats):
        chance, steps = rng.uniform(0.5, 1.5, 16), rng.integers(30, 60, 16)
        before, after = result(chance, steps), result(chance + 0.2, rng.integers(30, 60, 16))
        low, high = before["acceptance_length_interval"]
        least, most = comparison(before, after)["gain_interval"]
        missed += [not low <= truth <= high, not least <= 0.2 <= most]
    assert (missed / repeats > 0.02).all(), missed
    assert (missed / repeats < 0.09).all(), missed
    assert length_interval([(3, 4)]) is None
    assert length_interval([(3, 4), (0, 0)]) is None


def test_no_seed_is_refused():
    with pytest.raises(ConfigError, match=r"evaluate\.seeds"):
        EvaluateConfig(seeds=())
