"""What a batch run came to."""

from dataclasses import dataclass
from typing import Any

from jaxspec.engine import AcceptanceStats


@dataclass(frozen=True)
class Summary:
    """Counts and speed of one run.

    Attributes:
      rows: answered in this run.
      rows_failed: reported and left out.
      rows_skipped: answered by an earlier run.
      prompt_tokens: read by the model; a turn reads the turns before it again.
      tokens: generated.
      load_seconds: loading and compiling.
      seconds: from the first prompt to the last token.
      stats: what became of the drafts.
    """

    rows: int
    rows_failed: int
    rows_skipped: int
    prompt_tokens: int
    tokens: int
    load_seconds: float
    seconds: float
    stats: AcceptanceStats

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of `seconds`: prefill counts, loading and compiling do not."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "rows": self.rows,
            "rows_failed": self.rows_failed,
            "rows_skipped": self.rows_skipped,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "load_seconds": self.load_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            **self.stats.as_dict(),
        }

    def table(self) -> str:
        """The same for people."""
        lines = [
            ("rows", f"{self.rows} ({self.rows_failed} failed, {self.rows_skipped} done before)"),
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
