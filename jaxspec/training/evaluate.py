"""Measuring acceptance with the engine."""

import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

from jaxspec.engine import AcceptanceStats, Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.config import EvaluateConfig

ACCEPTANCE = "acceptance.json"


def measure_acceptance(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, *, label: str = "evaluate"
) -> dict[str, Any]:
    """Answers every prompt and sums up the acceptance statistics.

    Returns:
      `AcceptanceStats.to_dict`, with "prompts", "tokens", "seconds" and "tokens_per_second".
    """
    total, tokens, begin = AcceptanceStats(), 0, time.monotonic()
    requests = (engine.make_request(prompt, params) for prompt in prompts)
    with tqdm(total=len(prompts), desc=label, unit="answer", mininterval=2) as bar:
        for _, generation in engine.run(requests):
            total.add(generation.stats)
            tokens += len(generation.token_ids)
            bar.update()
    seconds = time.monotonic() - begin
    return {
        **total.to_dict(),
        "prompts": len(prompts),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def measure(
    engine: Engine, prompts: Mapping[str, list[list[int]]], config: EvaluateConfig
) -> dict[str, dict[str, Any]]:
    """`measure_acceptance` for every set of prompts at every temperature, by the key "SET temperature T".

    Args:
      engine: answers the prompts.
      prompts: token ids of the prompts of each set, by name.
      config: temperatures and lengths.
    """
    results = {}
    for name, encoded in prompts.items():
        for temperature in config.temperatures:
            params = SamplingParams(
                temperature=float(temperature), max_new_tokens=config.max_new_tokens, seed=0
            )
            label = f"{name} temperature {temperature:g}"
            results[label] = measure_acceptance(engine, encoded, params, label=label)
    return results
