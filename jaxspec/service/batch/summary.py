"""The summary of a batch run."""

from dataclasses import dataclass, field
from typing import Any

from jaxspec.engine import AcceptanceStats

MAX_FAILURES = 100
"""The most failures that a summary lists; all are counted."""


@dataclass(frozen=True)
class Summary:
    """Counts and speed of one run.

    Attributes:
      rows: rows of the input; each was answered, skipped or failed.
      answered: rows answered by this run.
      skipped: rows answered by an earlier run.
      failures: errors of the first `MAX_FAILURES` failed rows.
      seed: the run's seed, given or drawn.
      prompt_tokens: tokens of all prompts; the prompt of a turn includes the turns before it.
      tokens: generated tokens.
      load_seconds: time of loading and compiling.
      seconds: time from the first prompt to the last token.
      stats: acceptance statistics.
    """

    rows: int = 0
    answered: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    seed: int | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def failed(self) -> int:
        """Rows without an answer."""
        return self.rows - self.answered - self.skipped

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, including prefill but not loading and compiling."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "rows": self.rows,
            "answered": self.answered,
            "failed": self.failed,
            "skipped": self.skipped,
            "failures": list(self.failures),
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "load_seconds": self.load_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            **self.stats.to_dict(),
        }

    def table(self) -> str:
        """The summary as a text table."""
        counts = f"{self.answered} answered, {self.failed} failed, {self.skipped} answered before"
        lines = [
            ("rows", f"{self.rows}: {counts}"),
            ("seed", f"{self.seed}"),
            ("tokens", f"{self.tokens} in {self.seconds:.1f} s, after {self.load_seconds:.1f} s of loading"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
            ("target passes", f"{self.stats.steps} ({self.stats.draft_steps} of them with drafts to verify)"),
            ("mean acceptance length", f"{self.stats.acceptance_length:.2f}"),
        ]
        rates = zip(self.stats.acceptance_per_position, self.stats.conditional_acceptance, strict=True)
        lines += [
            (f"acceptance at token {position}", f"{so_far:.3f}   ({alone:.3f} of those reached)")
            for position, (so_far, alone) in enumerate(rates)
        ]
        return "\n".join(f"{name:<24}{value}" for name, value in lines)
