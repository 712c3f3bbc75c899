"""Tests whether a drafter changes a target's answers: greedy ones by tokens, sampled ones by chi-square."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.drafters.formats import DrafterChoice
from jaxspec.engine import AcceptanceStats, Engine, EngineError, Generation
from jaxspec.engine.api.load import load
from jaxspec.engine.api.prompts import Prompt, as_prompts
from jaxspec.lab.bitwise import BitDifference, first_difference_in_bits
from jaxspec.sampling import SamplingParams

_COMMON = 10
"""How often a value must occur in two samples together to be compared by itself."""

PROMPTS = (
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6],
    [9, 8, 7],
    [11, 12, 13, 14, 15, 16, 17, 18, 11, 12, 13, 14],
)
"""Prompts of token ids that most vocabularies have. Their repetitions give an n-gram drafter drafts."""

ENOUGH = 0.25
"""The largest `LosslessReport.smallest_difference` with which distributions may be called equal."""
POWER = 0.9
"""The probability with which the tests find a difference of `LosslessReport.smallest_difference`."""


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
    """The result of `check_lossless`; true if its `outcome` is "equal".

    Attributes:
      differences: the first difference of each prompt whose greedy answers differ.
      p_value: p-value of the hypothesis that sampled tokens have the same distribution with and without the
        drafter.
      significance: the level below which `p_value` counts against the drafter.
      smallest_difference: the total variation distance, 0 to 1, that so many samples show with a probability
        of at least 90 %: any change of the second token's distribution after any of the prompts that moves
        so much probability from some tokens to others. Tokens that occur fewer than ten times count as one.
      samples: sampled answers per prompt and engine.
      temperature: their temperature.
      greedy, sampled: acceptance in the greedy and the sampled answers.
      bits: the first operation of the target that gives a row other bits in company than alone; None if there
        is none, or if it was not searched for.
    """

    differences: tuple[Difference, ...]
    p_value: float
    significance: float
    smallest_difference: float
    samples: int
    temperature: float
    greedy: AcceptanceStats
    sampled: AcceptanceStats
    bits: BitDifference | None = None

    @property
    def outcome(self) -> Literal["equal", "different", "cannot tell"]:
        """Whether a difference was found, and if not, whether the samples suffice.

        "cannot tell" means that there are so few that `smallest_difference` is above `ENOUGH`. Without
        samples, greedy answers alone decide.
        """
        if self.differences or self.bits or self.p_value < self.significance:
            return "different"
        return "cannot tell" if self.samples and self.smallest_difference > ENOUGH else "equal"

    def __bool__(self) -> bool:
        """Whether the outcome is "equal"."""
        return self.outcome == "equal"

    def __str__(self) -> str:
        lines = [
            f"prompt {at.prompt} differs at token {at.token}: {at.plain} without drafts, {at.drafted} with"
            for at in self.differences
        ] or [f"greedy: the same tokens, {self.greedy.acceptance_length:.2f} a step"]
        if self.bits is not None:
            lines.append(str(self.bits))
        if not self.samples:
            return "\n".join([*lines, "sampled: not compared"])
        if self.p_value < self.significance:
            verdict = "another distribution"
        elif self.smallest_difference > ENOUGH:
            verdict = "cannot tell, with too few samples"
        else:
            verdict = "the same distribution"
        lines.append(
            f"sampled at temperature {self.temperature:g}: {verdict} (p = {self.p_value:.2g}), "
            f"{self.sampled.acceptance_length:.2f} a step; {self.samples} samples of a prompt show "
            f"differences of {self.smallest_difference:.2f} and more"
        )
        return "\n".join(lines)


def check_lossless(
    drafter: DrafterChoice,
    target: str | Path,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    max_new_tokens: int = 48,
    samples: int = 2000,
    temperature: float = 1.0,
    seed: int = 0,
    significance: float = 1e-4,
    bitwise: bool = False,
    **engine: Any,
) -> LosslessReport:
    """Compares the answers of an engine with a drafter to those of one without.

    Greedy answers must be equal token for token. Then both engines answer each prompt `samples` times, with
    different seeds. Chi-square tests of homogeneity compare the second tokens, the third tokens and the pairs
    of both; the first token comes from the pass that reads the prompt, which has no drafts.

    The tests cannot prove equality: the report says how small a difference they would have found. A drafter
    whose drafts are never accepted passes whatever it does wrong, and is warned about.

    In bfloat16, greedy answers may differ where two logits are nearly equal, because sums are computed in
    another order, unless `engine.exact` is set. In float32, the default here, this is rare.

    Args:
      drafter: as for `load`.
      target: the model, as for `load`.
      prompts: as for `Engine.generate`.
      max_new_tokens: length of greedy answers.
      samples: sampled answers per prompt and engine. With the default, and mostly with 600 or more, the
        outcome is not "cannot tell". 0 compares greedy answers alone.
      temperature: temperature of sampled answers.
      seed: seed of the first sampled answer; the others count up from it, modulo 2**64.
      significance: level of the test over all prompts together.
      bitwise: load engines with `exact`, in their default dtype, and compare all results of the target for a
        prompt and its answer, bit by bit, between rows alone and in company (`first_difference_in_bits`).
      **engine: fields of `EngineConfig`.

    Raises:
      ValueError: as for `load` and `Engine.generate`; there is no prompt, or one leaves too little room;
        samples is below 0; or significance is not between 0 and 1.
      EngineError: an answer failed.
    """
    numbers = {"exact": True} if bitwise else {"dtype": "float32"}
    sizes = {**numbers, "progress": False, **engine}
    every = as_prompts(prompts)
    if not every or samples < 0:
        raise ValueError(f"there must be prompts, and samples 0 or more, got {len(every)} and {samples}")
    if not 0 < significance < 1:
        raise ValueError(f"significance must be between 0 and 1, got {significance}")
    found: list[Difference] = []
    greedy, sampled = AcceptanceStats(), AcceptanceStats()
    with (
        load(target, drafter={"kind": "none"}, **sizes) as plain,
        load(target, drafter=drafter, **sizes) as other,
    ):
        answers = [each.generate(every, max_new_tokens=max_new_tokens) for each in (plain, other)]
        for i, (one, two) in enumerate(zip(*answers, strict=True)):
            _check_answer(one)
            _check_answer(two)
            greedy.add(two.stats)
            if (difference := first_difference(i, one, two)) is not None:
                found.append(difference)
        compared = [
            tuple(
                _counts(each, prompt, samples, seed + samples * i, temperature, sampled if i else None)
                for i, each in enumerate((plain, other))
            )
            for prompt in (every if samples else ())
        ]
        text = answers[0][0].prompt_token_ids + answers[0][0].token_ids
        bits = first_difference_in_bits(plain, text) if bitwise else None
    pairs = [pair for counts in compared for pair in zip(*counts, strict=True)]
    # Bonferroni: the smallest of n p-values is below x with a probability of at most n x.
    p_value = min(1.0, min((homogeneity(*pair) for pair in pairs), default=1.0) * max(len(pairs), 1))
    seconds = [(one[0], two[0]) for one, two in compared]
    smallest = max((smallest_difference(*pair, significance / len(pairs)) for pair in seconds), default=1.0)
    asked = {"greedy": greedy, **({"sampled": sampled} if samples else {})}
    if idle := [name for name, stats in asked.items() if not stats.accepted]:
        warnings.warn(
            f"no draft was accepted in the {' and '.join(idle)} answers, which say little about the drafter "
            "then: give prompts that it continues well",
            stacklevel=2,
        )
    return LosslessReport(
        tuple(found), p_value, significance, smallest, samples, temperature, greedy, sampled, bits
    )


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
    from scipy.stats import chi2_contingency  # imports slowly

    table = _table(one, two)
    return float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0


def smallest_difference(one: Counter[Any], two: Counter[Any], level: float) -> float:
    """The total variation distance that `homogeneity` of such samples shows at a level, 1 if none.

    Distributions at a distance of d make its statistic of n samples each noncentral by at least 2 n d², so
    every difference of this size is found with a probability of `POWER` or more.
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    samples = min(one.total(), two.total())
    if max((one + two).values(), default=0) < _COMMON:
        return 1.0  # all of it is pooled
    degrees = max(_table(one, two).shape[1] - 1, 1)
    limit = chi2.isf(level, degrees)
    needed = brentq(lambda noncentral: ncx2.sf(limit, degrees, noncentral) - POWER, 1e-6, 1e3 + 10 * limit)
    return min(1.0, float(np.sqrt(needed / (2 * samples))))


def _table(one: Counter[Any], two: Counter[Any]) -> np.ndarray:
    """The counts i64[2, columns] of the values that are common, and those of all others together, if any."""
    both = one + two
    common = [kind for kind in both if both[kind] >= _COMMON]
    table = np.array([[sample[kind] for kind in common] for sample in (one, two)], np.int64).reshape(2, -1)
    rare = np.array([[sample.total()] for sample in (one, two)]) - table.sum(axis=1, keepdims=True)
    table = np.hstack([table, rare])
    return table[:, table.sum(axis=0) > 0]


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
