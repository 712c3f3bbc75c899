"""Starting a Python process that a test talks to."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def python(*arguments: object, stderr: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running Python with text pipes as stdin and stdout; waits for its end on exit.

    Args:
      arguments: of the command line, after the interpreter.
      stderr: the file that gets its stderr, so that a full pipe can't block it.
      **options: of `subprocess.Popen`.
    """
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        stderr.open("w") as errors,
        subprocess.Popen(command, **pipes, stderr=errors, text=True, **options) as process,
    ):
        yield process
