"""Counts of an engine's work, and of how much of it was useful."""

from dataclasses import dataclass
from operator import sub


@dataclass
class Counters:
    """Work since the engine was made; every count only grows.

    Attributes:
      prompt_rows: prompt rows that programs computed, padding included.
      prompt_rows_used: those of them that were a prompt's tokens.
      cached_rows: prompt tokens that were found in the prefix cache and not computed.
      slot_steps: slots of the decode programs, summed over their steps.
      slot_steps_used: those of them that emitted; the others were empty or had ended earlier in the dispatch.
      steps: passes over the target's weights that decode, with or without prompt rows in the same pass.
      prompt_passes: passes over the target's weights that only read prompts.
      dispatches: programs that the host enqueued.
      compiles: programs compiled, or read from disk.
    """

    prompt_rows: int = 0
    prompt_rows_used: int = 0
    cached_rows: int = 0
    slot_steps: int = 0
    slot_steps_used: int = 0
    steps: int = 0
    prompt_passes: int = 0
    dispatches: int = 0
    compiles: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))

    def since(self, earlier: "Counters") -> "Counters":
        """The work since an earlier copy (`dataclasses.replace(counters)`)."""
        return Counters(*map(sub, vars(self).values(), vars(earlier).values()))
