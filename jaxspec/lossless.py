"""Whether a drafter changes what a target says: greedy answers token by token, sampled ones by chi-square."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import DrafterConfig
from jaxspec.engine import AcceptanceStats, Engine, Generation
from jaxspec.engine.load import load
from jaxspec.engine.prompts import Prompt
from jaxspec.sampling import SamplingParams

PROMPTS = (
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],
    [9, 8, 7],
    [11, 12, 13, 14, 15, 16, 17, 18, 11, 12, 13, 14],
)
"""Token ids that most vocabularies have; repetitions give an n-gram drafter something to propose."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers part.

    Attributes:
      prompt: its index.
      token: the first token of the answer that differs, from 0.
      plain, drafted: the tokens there; None where an answer has ended.
    """

    prompt: int
    token: int
    plain: int | None
    drafted: int | None


@dataclass(frozen=True)
class LosslessReport:
    """What `check_lossless` found.

    Attributes:
      differences: the first one of each prompt whose greedy answers differ.
      p_value: of the hypothesis that sampled tokens have one distribution with and without the drafter.
      significance: below which p_value counts against the drafter.
      greedy, sampled: acceptance in either part.
    """

    differences: tuple[Difference, ...]
    p_value: float
    significance: float
    greedy: AcceptanceStats
    sampled: AcceptanceStats

    def __bool__(self) -> bool:
        """Whether nothing was found."""
        return not self.differences and self.p_value >= self.significance

    def __str__(self) -> str:
        lines = [
            f"prompt {at.prompt} differs at token {at.token}: {at.plain} plainly, {at.drafted} with drafts"
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
    """Answers with a drafter and without it, and compares.

    Greedy answers must be equal token for token. Then each prompt is answered `samples` times by either
    engine, with other seeds, and their second tokens, their third ones and the pairs of both are compared by
    chi-square tests of homogeneity: the first token comes out of the prompt's pass, which drafts nothing.

    In bfloat16 a greedy difference may be a tie of two logits that sums in another order decided otherwise;
    float32 has hardly any.

    Args:
      drafter: as `load` takes it: {"kind": …, …}.
      target: as `load` takes it.
      prompts: as `Engine.generate` takes them.
      max_new_tokens: of greedy answers.
      samples: sampled answers a prompt and engine; 0 leaves that part out, with a p-value of 1.
      temperature: of sampled answers.
      seed: of the first one.
      significance: of the chi-square test, over all prompts together.
      **engine: fields of `EngineConfig`.

    Raises:
      ValueError: as `load` and `Engine.generate`.
    """
    sizes = {"dtype": "float32", "progress": False, **engine}
    drafting = drafter if isinstance(drafter, Mapping) else vars(drafter)
    found: list[Difference] = []
    greedy, sampled = AcceptanceStats(), AcceptanceStats()
    with (
        load(target, drafter={"kind": "none"}, **sizes) as plain,
        load(target, drafter=drafting, **sizes) as other,
    ):
        answers = [each.generate(list(prompts), max_new_tokens=max_new_tokens) for each in (plain, other)]
        for i, (one, two) in enumerate(zip(*answers, strict=True)):
            greedy.add(two.stats)
            if (difference := first_difference(i, one, two)) is not None:
                found.append(difference)
        p_values = []
        for prompt in prompts if samples else ():
            counts = [
                _counts(each, prompt, samples, seed + samples * i, temperature, sampled if i else None)
                for i, each in enumerate((plain, other))
            ]
            p_values += [homogeneity(*samples_of) for samples_of in zip(*counts, strict=True)]
    # Bonferroni's bound: the smallest of n p-values is below x with a chance of at most n x.
    p_value = min(1.0, min(p_values, default=1.0) * max(len(p_values), 1))
    return LosslessReport(tuple(found), p_value, significance, greedy, sampled)


def first_difference(prompt: int, plain: Generation, drafted: Generation) -> Difference | None:
    """Where two answers to a prompt of this index part; None if nowhere."""
    pairs = zip([*plain.token_ids, None], [*drafted.token_ids, None], strict=False)
    for token, (one, two) in enumerate(pairs):
        if one != two:
            return Difference(prompt, token, one, two)
    return None


def homogeneity(one: Counter[Any], two: Counter[Any]) -> float:
    """The p-value of a chi-square test that two samples were drawn from one distribution.

    Kinds that were seen fewer than ten times in both together count as one.
    """
    both = one + two
    from scipy.stats import chi2_contingency  # imports slowly

    common = [kind for kind in both if both[kind] >= 10]
    table = np.array([[sample[kind] for kind in common] for sample in (one, two)], np.int64).reshape(2, -1)
    rare = np.array([[sample.total()] for sample in (one, two)]) - table.sum(axis=1, keepdims=True)
    table = np.hstack([table, rare])
    table = table[:, table.sum(axis=0) > 0]
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def _counts(
    engine: Engine,
    prompt: Prompt,
    samples: int,
    first_seed: int,
    temperature: float,
    stats: AcceptanceStats | None,
) -> tuple[Counter[int], Counter[int], Counter[tuple[int, int]]]:
    """How often each second token, each third one and each pair of them came."""
    requests = [
        engine.make_request(
            prompt,
            SamplingParams(max_new_tokens=3, temperature=temperature, seed=first_seed + i, ignore_eos=True),
        )
        for i in range(samples)
    ]
    pairs: Counter[tuple[int, int]] = Counter()
    for _, generation in engine.run(requests):
        _, second, third = generation.token_ids
        pairs[second, third] += 1
        if stats is not None:
            stats.add(generation.stats)
    seconds, thirds = Counter[int](), Counter[int]()
    for (second, third), count in pairs.items():
        seconds[second] += count
        thirds[third] += count
    return seconds, thirds, pairs
