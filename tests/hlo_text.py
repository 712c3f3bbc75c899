"""What a compiled program's text says of the arrays that it makes."""

import re
from collections.abc import Iterator

import numpy as np


def instructions(text: str) -> Iterator[tuple[str, str, int]]:
    """(line, operation, numbers in its result) of every instruction that makes one array."""
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* (\S+?)\(", line)
        if match:
            yield line.strip(), match[2], int(np.prod([int(n) for n in match[1].split(",")]))


def num_aliases(text: str) -> int:
    """Arrays that the program updates in place of an argument."""
    header = text[: text.index("\n")]
    return header.count("may-alias") + header.count("must-alias")
