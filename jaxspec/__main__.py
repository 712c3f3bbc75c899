"""The command `jaxspec`, or `python -m jaxspec`: its subcommands are in `jaxspec/commands/`.

`jaxspec "Why is the sky blue?"` is short for `jaxspec generate "Why is the sky blue?"`.
"""

import sys
from importlib import import_module

from jaxspec.commands import COMMANDS


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    command, rest = (words[0], words[1:]) if words and words[0] in COMMANDS else ("generate", words)
    status: int = import_module(f"jaxspec.commands.{command}").main(rest)
    compiling = sys.modules.get("jaxspec.engine.compiling")
    if status == 130 and arguments is None and compiling is not None:
        compiling.end_process(status)  # an interrupt does not wait for programs that are being compiled
    return status


if __name__ == "__main__":
    sys.exit(main())
