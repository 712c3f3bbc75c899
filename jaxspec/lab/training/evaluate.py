"""Measuring acceptance with the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxspec.engine import AcceptanceStats, Engine
from jaxspec.engine.host.statistics import Interval
from jaxspec.lab.training.answers import fitting
from jaxspec.lab.training.config import EvaluateConfig
from jaxspec.sampling import SamplingParams

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
      "tokens", "acceptance_length_by_seed", a list, "by_prompt", the accepted drafts and the draft steps of
      each prompt over all seeds, and "acceptance_length_interval" (see `length_interval`).
    """
    asked = [
        (f"{name} temperature {temperature:g}", temperature, seed, number, ids)
        for name, encoded in prompts.items()
        for temperature in config.temperatures
        for seed in (config.seeds if temperature else config.seeds[:1])
        for number, ids in enumerate(encoded)
    ]
    by_seed: dict[str, dict[int, AcceptanceStats]] = {}
    by_prompt: dict[str, dict[int, AcceptanceStats]] = {}
    tokens: dict[str, int] = {}
    for key, _, seed, number, _ in asked:
        by_seed.setdefault(key, {})[seed] = AcceptanceStats()
        by_prompt.setdefault(key, {})[number] = AcceptanceStats()
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
        for _, temperature, seed, _, ids in asked
    )
    with tqdm(total=len(asked), desc=label, unit="answer", mininterval=2) as bar:
        for at, generation in engine.run(requests):
            key, _, seed, number, _ = asked[at]
            by_seed[key][seed].add(generation.stats)
            by_prompt[key][number].add(generation.stats)
            tokens[key] += len(generation.token_ids)
            bar.update()
    results = {}
    for key, seeds in by_seed.items():
        counts = [(stats.accepted, stats.draft_steps) for stats in by_prompt[key].values()]
        results[key] = {
            **AcceptanceStats.total(seeds.values()).to_dict(),
            "prompts": len(prompts[key.rpartition(" temperature ")[0]]),
            "tokens": tokens[key],
            "acceptance_length_by_seed": [stats.acceptance_length for stats in seeds.values()],
            "by_prompt": counts,
            "acceptance_length_interval": length_interval(counts),
        }
    return results


def length_interval(by_prompt: Sequence[tuple[int, int]]) -> Interval | None:
    """The 95 % interval of an acceptance length over prompts; None for fewer than two prompts with drafts.

    Prompts differ more than steps do, so it is for other prompts of the same kind.

    Args:
      by_prompt: accepted drafts and draft steps of each prompt.
    """
    mean, parts = _mean_and_parts(by_prompt)
    half = _half_width(parts, sum(steps > 0 for _, steps in by_prompt))
    return None if half is None else (max(1.0, mean - half), mean + half)


def comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Two of `measure`'s results for the same prompts: lengths, intervals, and that of the gain.

    The interval of the gain is of differences prompt by prompt, None for fewer than two prompts.
    """
    pairs = (before["by_prompt"], after["by_prompt"])
    (_, old), (_, new) = map(_mean_and_parts, pairs)
    gain = after["acceptance_length"] - before["acceptance_length"]
    half = _half_width(new - old, min(sum(steps > 0 for _, steps in counts) for counts in pairs))
    return {
        "prompts": after["prompts"],
        "before": before["acceptance_length"],
        "before_interval": before["acceptance_length_interval"],
        "after": after["acceptance_length"],
        "after_interval": after["acceptance_length_interval"],
        "gain": gain,
        "gain_interval": None if half is None else (gain - half, gain + half),
    }


def _mean_and_parts(by_prompt: Sequence[tuple[int, int]]) -> tuple[float, np.ndarray]:
    """An acceptance length, and by how much each prompt moves it (the terms of its linear approximation)."""
    accepted, steps = np.asarray(by_prompt, np.float64).reshape(-1, 2).T
    total = max(steps.sum(), 1.0)
    mean = accepted.sum() / total
    return 1.0 + mean, (accepted - mean * steps) / total


def _half_width(parts: np.ndarray, prompts: int) -> float | None:
    from scipy.stats import t  # imports slowly

    if prompts < 2:
        return None
    return float(t.ppf(0.975, prompts - 1) * np.sqrt(prompts / (prompts - 1) * (parts**2).sum()))


def length_text(result: Mapping[str, Any]) -> str:
    """The acceptance length of one of `measure`'s results, with its interval if it has one."""
    return with_interval(result["acceptance_length"], result.get("acceptance_length_interval"))


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    """A value and the ends of its interval, with two decimals."""
    return f"{value:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
