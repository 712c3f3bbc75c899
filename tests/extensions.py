"""The example drafter, family and kind of attention of docs/, registered from outside the package."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import write_folder

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("writing-a-drafter.md", "adding-a-family.md", "adding-attention.md")
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
]
FILES = {source.split()[1]: source for source in BLOCKS if source.startswith("# ")}
"""The files shown in the pages, by name."""


def run(source: str) -> None:
    """Runs a block of code of the pages; all blocks share one module."""
    exec(compile(source, DOCS, "exec"), _MODULE)


_MODULE: dict[str, Any] = {"__name__": "extending"}
for _source in FILES.values():
    run(_source)


def write_bigram(folder: Path, *, vocab_size: int = 48, seed: int = 1) -> Path:
    """Writes a bigram table that mostly drafts the last token again."""
    noise = np.random.default_rng(seed).normal(size=(vocab_size, vocab_size))
    table = (2 * np.eye(vocab_size) + noise).astype(np.float32)
    return write_folder(folder, {"vocab_size": vocab_size}, {"bigram.weight": table})
