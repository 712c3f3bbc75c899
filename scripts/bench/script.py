"""What the scripts share: options, times, and where results go."""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.command_line import Parser, report
from jaxspec.provenance import provenance


def new_parser(description: str | None, option: str = "--json") -> Parser:
    """A parser with an option for the result's file, `json`."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, dest="json", type=Path, metavar="FILE", help="also write the result here")
    return parser


def numbers(kind: type = int) -> Callable[[str], list]:
    """What an option with numbers between commas is read with."""
    return lambda text: [kind(part) for part in text.split(",")]


def run_script(
    file: str,
    parse: Callable[[list[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace], tuple[dict[str, Any], int]],
    arguments: list[str] | None,
) -> int:
    """Runs a script; returns its exit status, 2 after an error, which is one line.

    Args:
      file: the script's.
      parse: reads its arguments.
      measure: returns the result, which is written with where it comes from, and the status.
      arguments: those of the command line if None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    try:
        if args.json:  # rather fail before measuring than after
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.touch()
        result, status = measure(args)
    except (ValueError, OSError) as error:
        return report(error)
    if args.json:
        path = Path(file)
        where = provenance(shlex.join([f"scripts/{path.name}", *arguments]), path.parent)
        args.json.write_text(json.dumps({**where, **result}, indent=1) + "\n", encoding="utf-8")
    return status


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of a run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """Seconds of a run: the median of several, after one that is not timed."""
    return statistics.median([seconds_of(run) for _ in range(runs + 1)][1:])


def in_turns(names: Sequence[str], turn: int) -> Iterator[str]:
    """The names, beginning with another one in every turn, so that all meet the same load."""
    first = turn % len(names)
    yield from (*names[first:], *names[:first])
