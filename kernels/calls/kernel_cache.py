"""Where kernels that are compiled on this machine are kept between runs."""

from collections.abc import Callable
from pathlib import Path


def _unspecified() -> Path | None:
    return None


find_folder: Callable[[], Path | None] = _unspecified
"""Returns the folder; None leaves the choice to the kernels' compiler. The program around the kernels may put
another function here."""
