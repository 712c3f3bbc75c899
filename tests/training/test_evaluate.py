"""Acceptance of several sets, temperatures and seeds, all answered in one run."""

import pytest
from tiny_engines import TinyEngines

from jaxspec.config import ConfigError
from jaxspec.engine import AcceptanceStats
from jaxspec.sampling import SamplingParams
from jaxspec.training.config import EvaluateConfig
from jaxspec.training.evaluate import measure

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
            assert result["steps"] == sum(stats.steps for stats in by_seed)
            assert result["accepted"] == sum(stats.accepted for stats in by_seed)
            assert (result["prompts"], result["tokens"]) == (len(prompts), tokens)
            accepted += result["accepted"]
    assert accepted
    assert not found


def test_no_seed_is_refused():
    with pytest.raises(ConfigError, match=r"evaluate\.seeds"):
        EvaluateConfig(seeds=())
