"""Starting a Python process that a test talks to."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def python(*arguments: object, stderr: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running Python process with text pipes for stdin and stdout; leaving the context waits for its end.

    Args:
      *arguments: the command line, without the interpreter.
      stderr: file for its stderr; a pipe could fill up and block the process.
      **options: of `subprocess.Popen`.
    """
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        stderr.open("w") as errors,
        subprocess.Popen(command, **pipes, stderr=errors, text=True, **options) as process,
    ):
        yield process
