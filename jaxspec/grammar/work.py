"""The bound of what reading a grammar may cost."""

from jaxspec.sampling.grammar import GrammarError

_MOST = 1 << 19


class Work:
    """Counts steps of about a microsecond, so that what explodes is refused within a second anywhere."""

    def __init__(self) -> None:
        self._steps = 0

    def count(self, steps: int) -> None:
        """Counts steps that are about to be taken.

        Raises:
          GrammarError: they are too many.
        """
        self._steps += steps
        if self._steps > _MOST:
            raise GrammarError("the grammar is too large: it is too long, or compares or lists too much")
