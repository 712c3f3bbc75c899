"""Tests whether a drafter changes a target's answers: greedy ones by tokens, sampled ones by chi-square."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import DrafterConfig
from jaxspec.engine import AcceptanceStats, Engine, EngineError, Generation
from jaxspec.engine.load import load
from jaxspec.engine.prompts import Prompt, as_prompts
from jaxspec.sampling import SamplingParams

PROMPTS = (
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],
    [9, 8, 7],
    [11, 12, 13, 14, 15, 16, 17, 18, 11, 12, 13, 14],
)
"""Prompts of token ids that most vocabularies have. Their repetitions give an n-gram drafter drafts."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two greedy answers to a prompt.

    Attributes:
      prompt: index of the prompt.
      token: index of the first token of the answer that differs.
      plain, drafted: the tokens there, without and with the drafter; None if that answer has ended.
    """

    prompt: int
    token: int
    plain: int | None
    drafted: int | None


@dataclass(frozen=True)
class LosslessReport:
    """The result of `check_lossless`; true if no difference was found.

    Attributes:
      differences: the first difference of each prompt whose greedy answers differ.
      p_value: p-value of the hypothesis that sampled tokens have the same distribution with and without the
        drafter.
      significance: the level below which `p_value` counts against the drafter.
      greedy, sampled: acceptance in the greedy and the sampled answers.
    """

    differences: tuple[Difference, ...]
    p_value: float
    significance: float
    greedy: AcceptanceStats
    sampled: AcceptanceStats

    def __bool__(self) -> bool:
        """Whether the greedy answers are equal and `p_value` is at least `significance`."""
        return not self.differences and self.p_value >= self.significance

    def __str__(self) -> str:
        lines = [
            f"prompt {at.prompt} differs at token {at.token}: {at.plain} without drafts, {at.drafted} with"
            for at in self.differences
        ] or [f"greedy: the same tokens, {self.greedy.acceptance_length:.2f} a step"]
        verdict = "the same distribution" if self.p_value >= self.significance else "another distribution"
        lines.append(
            f"sampled: {verdict} (p = {self.p_value:.2g}), {self.sampled.acceptance_length:.2f} a step"
        )
        return "\n".join(lines)


def check_lossless(
    drafter: Mapping[str, Any] | DrafterConfig,
    target: str | Path,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    max_new_tokens: int = 48,
    samples: int = 2000,
    temperature: float = 1.0,
    seed: int = 0,
    significance: float = 1e-4,
    **engine: Any,
) -> LosslessReport:
    """Compares the answers of an engine with a drafter to those of one without.

    Greedy answers must be equal token for token. Then both engines answer each prompt `samples` times, with
    different seeds. Chi-square tests of homogeneity compare the second tokens, the third tokens and the pairs
    of both; the first token comes from the pass that reads the prompt, which has no drafts.

    In bfloat16, greedy answers may differ where two logits are nearly equal, because sums are computed in
    another order. In float32, the default here, this is rare.

    Args:
      drafter: as for `load`: {"kind": …, …}.
      target: the model, as for `load`.
      prompts: as for `Engine.generate`.
      max_new_tokens: length of greedy answers.
      samples: sampled answers per prompt and engine; 0 skips the test, with a p-value of 1.
      temperature: temperature of sampled answers.
      seed: seed of the first sampled answer; the others count up from it, modulo 2**64.
      significance: level of the test over all prompts together.
      **engine: fields of `EngineConfig`.

    Raises:
      ValueError: as for `load` and `Engine.generate`; there is no prompt, or one leaves no room for three
        tokens; or samples is below 0.
      EngineError: an answer failed.
    """
    sizes = {"dtype": "float32", "progress": False, **engine}
    every = as_prompts(prompts)
    if not every or samples < 0:
        raise ValueError(f"there must be prompts, and samples 0 or more, got {len(every)} and {samples}")
    drafting = drafter if isinstance(drafter, Mapping) else vars(drafter)
    found: list[Difference] = []
    greedy, sampled = AcceptanceStats(), AcceptanceStats()
    with (
        load(target, drafter={"kind": "none"}, **sizes) as plain,
        load(target, drafter=drafting, **sizes) as other,
    ):
        answers = [each.generate(every, max_new_tokens=max_new_tokens) for each in (plain, other)]
        for i, (one, two) in enumerate(zip(*answers, strict=True)):
            _check_answer(one)
            _check_answer(two)
            greedy.add(two.stats)
            if (difference := first_difference(i, one, two)) is not None:
                found.append(difference)
        p_values = []
        for prompt in every if samples else ():
            counts = [
                _counts(each, prompt, samples, seed + samples * i, temperature, sampled if i else None)
                for i, each in enumerate((plain, other))
            ]
            p_values += [homogeneity(*samples_of) for samples_of in zip(*counts, strict=True)]
    # Bonferroni: the smallest of n p-values is below x with a probability of at most n x.
    p_value = min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))
    return LosslessReport(tuple(found), p_value, significance, greedy, sampled)


def first_difference(prompt: int, plain: Generation, drafted: Generation) -> Difference | None:
    """The first difference between two answers to prompt number `prompt`; None if they are equal."""
    pairs = zip([*plain.token_ids, None], [*drafted.token_ids, None], strict=False)
    for token, (one, two) in enumerate(pairs):
        if one != two:
            return Difference(prompt, token, one, two)
    return None


def homogeneity(one: Counter[Any], two: Counter[Any]) -> float:
    """The p-value of a chi-square test that two samples have the same distribution.

    Values that occur fewer than ten times in both samples together are pooled.
    """
    both = one + two
    from scipy.stats import chi2_contingency  # imports slowly

    common = [kind for kind in both if both[kind] >= 10]
    table = np.array([[sample[kind] for kind in common] for sample in (one, two)], np.int64).reshape(2, -1)
    rare = np.array([[sample.total()] for sample in (one, two)]) - table.sum(axis=1, keepdims=True)
    table = np.hstack([table, rare])
    table = table[:, table.sum(axis=0) > 0]
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def _check_answer(generation: Generation) -> None:
    if generation.error is not None:
        raise EngineError(f"an answer failed: {generation.error}")


def _counts(
    engine: Engine,
    prompt: Prompt,
    samples: int,
    first_seed: int,
    temperature: float,
    stats: AcceptanceStats | None,
) -> tuple[Counter[int], Counter[int], Counter[tuple[int, int]]]:
    """How often each second token, each third token and each pair of them occurred."""
    requests = [
        engine.make_request(
            prompt,
            SamplingParams(max_new_tokens=3, temperature=temperature, seed=seed % 2**64, ignore_eos=True),
        )
        for seed in range(first_seed, first_seed + samples)
    ]
    if requests[0].max_new_tokens < 3:
        raise ValueError(
            f"prompt of {len(requests[0].prompt)} tokens leaves no room for 3 more, which are compared: "
            f"max_model_len is {engine.max_model_len}"
        )
    pairs: Counter[tuple[int, int]] = Counter()
    for _, generation in engine.run(requests):
        _check_answer(generation)
        _, second, third = generation.token_ids
        pairs[second, third] += 1
        if stats is not None:
            stats.add(generation.stats)
    seconds, thirds = Counter[int](), Counter[int]()
    for (second, third), count in pairs.items():
        seconds[second] += count
        thirds[third] += count
    return seconds, thirds, pairs
