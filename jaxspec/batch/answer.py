"""The answer to a row."""

from dataclasses import dataclass
from typing import Any

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.rows import Row


@dataclass(frozen=True)
class Answer:
    """A finished row: one generation, or one per turn."""

    row: Row
    generations: list[Generation]

    @property
    def stats(self) -> AcceptanceStats:
        """The statistics of all turns together."""
        return AcceptanceStats.total(self.generations)

    def to_dict(self) -> dict[str, Any]:
        """The output row, with the last turn's answer; for a row with turns, "turns" holds all answers."""
        turns = [_record(generation) for generation in self.generations]
        record = {"id": self.row.id, "input_digest": self.row.digest, **turns[-1]}
        record["stats"] = self.stats.to_dict()
        if self.row.turns:
            record["turns"] = turns
        return record


def _record(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_tokens": len(generation.prompt_token_ids),
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "stats": generation.stats.to_dict(),
    }
