"""The command `jaxspec`, or `python -m jaxspec`: its subcommands are in `jaxspec/commands/`.

`jaxspec "Why is the sky blue?"` is short for `jaxspec generate "Why is the sky blue?"`.
"""

import os
import signal
import sys
from importlib import import_module
from types import FrameType

from jaxspec.commands import COMMANDS


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    compiling = sys.modules.get("jaxspec.engine.device.compiling")
    if status == 130 and arguments is None and compiling is not None:
        compiling.end_process(status)  # an interrupt does not wait for programs that are being compiled
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, which commands catch; but ends the process where a module is being imported.

    Nothing has begun then, and extension modules neither end at an exception nor leave it as it is.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(words: list[str]) -> int:
    if meant := _misspelt(words):
        print(
            f"error: there is no command {words[0]}; did you mean {meant}? "
            f"As a prompt: jaxspec generate {words[0]}",
            file=sys.stderr,
        )
        return 2
    command, rest = (words[0], words[1:]) if words and words[0] in COMMANDS else ("generate", words)
    status: int = import_module(f"jaxspec.commands.{command}").main(rest)
    return status


def _misspelt(words: list[str]) -> str | None:
    """The command that was probably meant by a first word that is none, and hardly a prompt."""
    if not words or words[0] in COMMANDS or not words[0].isalpha():
        return None
    from jaxspec.spelling import nearest

    return nearest(words[0], COMMANDS, likeness=0.8)


if __name__ == "__main__":
    sys.exit(main())
