"""The Python interpreter for processes of our own."""

import re
import shutil
import sys
from pathlib import Path

from jaxspec.errors import ConfigError

_NAME = re.compile(r"python(3(\.\d+)?)?t?(\.exe)?", re.IGNORECASE)


def python_interpreter() -> str:
    """The path of an interpreter of this version.

    In a program that embeds Python, or that was frozen into one file, `sys.executable` is None, empty or that
    program, which must not be started again. Then the interpreter is one of this version in the folder of
    this installation, or in PATH.

    Raises:
      ConfigError: there is none.
    """
    own = sys.executable
    if own and _NAME.fullmatch(Path(own).name) and not getattr(sys, "frozen", False):
        return own
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for prefix in (sys.prefix, sys.base_prefix):
        found = Path(prefix, "bin", name)
        if found.is_file():
            return str(found)
    in_path = shutil.which(name)
    if in_path is None:
        raise ConfigError(
            f"a process of Python is needed, but sys.executable is {own!r} and {name} is not in PATH"
        )
    return in_path
