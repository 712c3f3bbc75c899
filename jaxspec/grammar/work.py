"""The bound of what reading a grammar may cost, and why one has no automaton."""

from jaxspec.sampling.grammar import GrammarError

_MOST = 1 << 19


class Nothing(GrammarError):
    """Nothing has all that a grammar, or a part of it, asks for."""


class TooLarge(GrammarError):
    """A grammar is too large."""


class Work:
    """Counts steps of about a microsecond, so that what explodes is refused within a second anywhere."""

    def __init__(self) -> None:
        self._steps = 0

    def count(self, steps: int) -> None:
        """Counts steps that are about to be taken.

        Raises:
          TooLarge: they are too many.
        """
        self._steps += steps
        if self._steps > _MOST:
            raise TooLarge("the grammar is too large: it is too long, or compares or lists too much")
