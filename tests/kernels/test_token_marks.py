from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.token_marks import IN_PROMPT, token_marks
from op_base import OpTest


@dataclass(frozen=True)
class Case:
    name: str
    slots: int
    width: int
    size: int


class TestTokenMarks(OpTest):
    """Tokens of the output are counted, and those of the prompt are marked."""

    op = token_marks
    cases = (
        Case("one token", 1, 1, 1),
        Case("three texts", 3, 40, 7),
        Case("long texts", 8, 257, 100),
        Case("no room", 2, 0, 5),
    )
    usual = ("three texts", "long texts")
    by_row = (0, 1, 2)
    exact = ("xla", "numba")

    def arguments(self, case):
        rng = np.random.default_rng(case.slots)
        columns = rng.integers(-3, case.size + 3, size=(case.slots, case.width))  # some have no column here
        length = rng.integers(case.width + 1, size=case.slots)
        prompt_length = rng.integers(case.width + 2, size=case.slots)  # of a text that is still read: more
        return tuple(jnp.asarray(x, jnp.int32) for x in (columns, prompt_length, length))

    def options(self, case):
        return {"size": case.size}

    def definition(self, case, columns, prompt_length, length):
        expected = np.zeros((case.slots, case.size), np.int32)
        for slot in range(len(columns)):
            for place, column in enumerate(columns[slot, : length[slot]]):
                if 0 <= column < case.size and place < prompt_length[slot]:
                    expected[slot, column] = IN_PROMPT
                elif 0 <= column < case.size:
                    expected[slot, column] += 1
        return expected
