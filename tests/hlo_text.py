"""Reading a compiled program's text."""

import re
from collections.abc import Iterator

import numpy as np


def instructions(text: str) -> Iterator[tuple[str, str, int]]:
    """(line, operation, elements of the result) of every instruction with a single array as result."""
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* (\S+?)\(", line)
        if match:
            yield line.strip(), match[2], int(np.prod([int(n) for n in match[1].split(",")]))


def num_aliases(text: str) -> int:
    """The number of arguments that the program updates in place."""
    header = text[: text.index("\n")]
    return header.count("may-alias") + header.count("must-alias")
