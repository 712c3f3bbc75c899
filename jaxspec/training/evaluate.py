"""Measuring acceptance with the engine."""

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

from jaxspec.engine import AcceptanceStats, Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.answers import fitting
from jaxspec.training.config import EvaluateConfig

ACCEPTANCE = "acceptance.json"


def measure(
    engine: Engine,
    prompts: Mapping[str, list[list[int]]],
    config: EvaluateConfig,
    *,
    label: str = "evaluate",
) -> dict[str, dict[str, Any]]:
    """Answers the prompts of every set at every temperature, and sums up the acceptance statistics.

    Greedy answers depend on no seed and are measured once, the others with each of `config.seeds`. All
    answers are generated in one run, so that the engine's slots stay full.

    Args:
      engine: answers the prompts.
      prompts: token ids of the prompts of each set, by name.
      config: temperatures, seeds and lengths.
      label: of the progress bar.

    Returns:
      For every key "SET temperature T" an `AcceptanceStats.to_dict` over all seeds, with "prompts",
      "tokens", and "acceptance_length_by_seed", a list.
    """
    asked = [
        (f"{name} temperature {temperature:g}", temperature, seed, ids)
        for name, encoded in prompts.items()
        for temperature in config.temperatures
        for seed in (config.seeds if temperature else config.seeds[:1])
        for ids in encoded
    ]
    by_seed: dict[str, dict[int, AcceptanceStats]] = {}
    tokens: dict[str, int] = {}
    for key, _, seed, _ in asked:
        by_seed.setdefault(key, {})[seed] = AcceptanceStats()
        tokens[key] = 0
    requests = (
        engine.make_request(
            ids,
            fitting(
                engine,
                ids,
                SamplingParams(
                    temperature=float(temperature), max_new_tokens=config.max_new_tokens, seed=seed
                ),
            ),
        )
        for _, temperature, seed, ids in asked
    )
    with tqdm(total=len(asked), desc=label, unit="answer", mininterval=2) as bar:
        for at, generation in engine.run(requests):
            key, _, seed, _ = asked[at]
            by_seed[key][seed].add(generation.stats)
            tokens[key] += len(generation.token_ids)
            bar.update()
    results = {}
    for key, seeds in by_seed.items():
        total = AcceptanceStats()
        for stats in seeds.values():
            total.add(stats)
        results[key] = {
            **total.to_dict(),
            "prompts": len(prompts[key.rpartition(" temperature ")[0]]),
            "tokens": tokens[key],
            "acceptance_length_by_seed": [stats.acceptance_length for stats in seeds.values()],
        }
    return results


def length_text(result: Mapping[str, Any]) -> str:
    """The acceptance length of one of `measure`'s results; of several seeds also the least and the most."""
    lengths = result["acceptance_length_by_seed"]
    text = f"{result['acceptance_length']:.2f}"
    return text if len(lengths) == 1 else f"{text} ({min(lengths):.2f} to {max(lengths):.2f})"
