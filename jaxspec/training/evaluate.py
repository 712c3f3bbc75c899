"""What a head is worth: acceptance through the real engine."""

import time
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from jaxspec.checkpoints import Tokenizer
from jaxspec.engine import AcceptanceStats, Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.config import EvaluateConfig
from jaxspec.training.prompts import encode_turn, read_prompts


def measure_acceptance(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, *, label: str = "evaluate"
) -> dict[str, Any]:
    """Answers every prompt and adds up what became of the drafts.

    Returns:
      The counts and rates of `AcceptanceStats`, with "tokens", "seconds" and "tokens_per_second".
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


def evaluate_head(
    engine: Engine, tokenizer: Tokenizer, config: EvaluateConfig, *, data: Path
) -> dict[str, dict[str, Any]]:
    """Every file at every temperature, as "file temperature t"."""
    results = {}
    for name in config.files:
        prompts = [encode_turn(tokenizer, turn) for turn in read_prompts(data / name)]
        for temperature in config.temperatures:
            params = SamplingParams(
                temperature=float(temperature), max_new_tokens=config.max_new_tokens, seed=0
            )
            label = f"{name} temperature {temperature:g}"
            results[label] = measure_acceptance(engine, prompts, params, label=label)
    return results
