"""The answer to a row."""

from dataclasses import dataclass
from typing import Any

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.service.openai import answer_body
from jaxspec.service.rows import Row, output_line


@dataclass(frozen=True)
class Answer:
    """A finished row: one generation, one per turn, or as many as `Row.n`.

    Attributes:
      body: the answer as OpenAI's API has it, to a line of OpenAI's batch files.
    """

    row: Row
    generations: list[Generation]
    body: dict[str, Any] | None = None

    @classmethod
    def to(cls, row: Row, generations: list[Generation]) -> "Answer":
        """The answer to a row, made where the generations still have their tokenizer."""
        body = None if row.asked is None else answer_body(row.asked, [generations])
        return cls(row, generations, body)

    @property
    def stats(self) -> AcceptanceStats:
        """The statistics of all generations together."""
        return AcceptanceStats.total(self.generations)

    def to_dict(self) -> dict[str, Any]:
        """The output row, with the last turn's answer; for a row with turns, "turns" holds all answers. With
        `Row.n` it has the first answer, and "samples" holds all. Keys that are kept stand before them."""
        if self.body is not None:
            return output_line(str(self.row.id), self.body, digest=self.row.digest)
        every = [_record(generation) for generation in self.generations]
        shown = every[-1] if self.row.n is None else every[0]
        record = {"id": self.row.id, "input_digest": self.row.digest, **self.row.kept, **shown}
        record["stats"] = self.stats.to_dict()
        if self.row.turns:
            record["turns"] = every
        if self.row.n is not None:
            record["samples"] = every
        return record


def _record(generation: Generation) -> dict[str, Any]:
    every = generation.to_dict()
    asked = {name: every[name] for name in ("logprobs", "top_logprobs") if every[name] is not None}
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_tokens": len(generation.prompt_token_ids),
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "stats": generation.stats.to_dict(),
        **asked,
    }
