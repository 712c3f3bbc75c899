"""Models in several GGUF files, named as by llama.cpp's gguf-split."""

import re

_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")
_MAX_PARTS = 1024


def parts_of(name: str) -> list[str]:
    """The names of all files of a model, in order; only `name` if it does not name one of several."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= _MAX_PARTS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[2]}.gguf" for number in range(1, int(match[2]) + 1)]
