"""Applies every fault of `faults.toml` to a copy of the working tree and runs the test that should fail.

    python tests/faults/run.py                 all faults; takes half an hour on two cores
    python tests/faults/run.py --part 3/10     every tenth of them, from the third on
    python tests/faults/run.py --part today    one of ten parts, so that ten days of work run all of them
    python tests/faults/run.py pages "a draft" faults whose names contain one of these
    python tests/faults/run.py --without       the same tests without the faults: they must pass
    python tests/faults/run.py --table         only rewrites README.md

Runs one more at a time than there are cores, as some tests wait, at most four; `--processes` is another
number.
Exits with 1 if a fault is not caught, or cannot be applied because the code has changed.
"""

import argparse
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT = 180
"""Seconds that one test may take; a hang counts as a failure."""


@dataclass(frozen=True)
class Fault:
    """A change that makes the program wrong, and the test that should fail with it.

    Attributes:
      name: what it does wrong.
      file: the file to change, relative to the root.
      before, after: the text to replace, which the file holds exactly once, and its replacement.
      test: a test file, relative to the root.
      k: pytest's `-k`; empty to run the whole file.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    k: str = ""

    def apply(self, root: Path) -> str:
        """Applies the fault to its file under `root` and returns the original text.

        Raises:
          ValueError: the file does not exist, or does not hold `before` exactly once.
        """
        path = root / self.file
        text = path.read_text("utf-8") if path.exists() else ""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} holds {self.before!r} {text.count(self.before)} times")
        path.write_text(text.replace(self.before, self.after), "utf-8")
        return text


def read_faults() -> list[Fault]:
    with (HERE / "faults.toml").open("rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def copy_tree(root: Path) -> None:
    """Copies all tracked files of the working tree, with uncommitted changes, and compiles them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    # Bytecode that a file's content checks: by its date, a file of the same length changed within the same
    # second would not be compiled again.
    compileall.compile_dir(root, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def run_test(fault: Fault, root: Path) -> tuple[int, str]:
    """The exit status of the fault's tests under `root`, and their output."""
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-p", "no:cacheprovider", fault.test]
    command += [f"--timeout={TIME_LIMIT}", "--timeout-method=thread", "-m", "not slow"]
    command += ["-k", fault.k] if fault.k else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        "PYTHONDONTWRITEBYTECODE": "1",  # see `copy_tree`
        "HYPOTHESIS_PROFILE": "fault",
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def try_fault(fault: Fault, root: Path) -> str:
    """Returns "caught", or why the fault was not caught."""
    try:
        text = fault.apply(root)
    except ValueError as error:
        return f"does not apply: {error}"
    try:
        status, printed = run_test(fault, root)
    finally:
        (root / fault.file).write_text(text, "utf-8")
    # Status 1 means that tests ran and failed; 2 to 5 are import errors or a `-k` that selects nothing.
    if status == 1:
        return "caught"
    return f"NOT CAUGHT (pytest ended with {status})\n{'' if status == 0 else printed[-2000:]}".rstrip()


def try_without(fault: Fault, root: Path) -> str:
    """Runs the fault's tests without the fault: returns "passed", or their output."""
    status, printed = run_test(fault, root)
    return "passed" if status == 0 else f"FAILED (pytest ended with {status})\n{printed[-2000:]}".rstrip()


def table(faults: list[Fault]) -> str:
    """The text of README.md."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    rows = [f"| {cell(f.name)} | `{f.file}` | {cell(_test_of(f))} |" for f in faults]
    return "\n".join(
        [
            "# Deliberate faults",
            "",
            f"{len(faults)} ways to break the engine: patches in `faults.toml`, each with a test that fails.",
            "`python tests/faults/run.py` applies them one by one to a copy of the tree and runs the tests.",
            "`test_faults.py`, part of the suite, checks that every patch still applies.",
            "This page is generated by `run.py --table`.",
            "",
            "| fault | file | caught by |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _test_of(fault: Fault) -> str:
    file = fault.test.removeprefix("tests/")
    return f"`{file}`" + (f' `-k "{fault.k}"`' if fault.k else "")


def part_of(faults: list[Fault], part: str) -> list[Fault]:
    """The faults of "I/N", each Nth beginning with the Ith; of "today", one of ten parts, by the date.

    The ten are the days from Monday to Friday of two weeks; a weekend runs its Friday's.

    Raises:
      ValueError: it is neither.
    """
    if part == "today":
        week, day = divmod(date.today().toordinal() - 1, 7)
        number, count = week % 2 * 5 + min(day, 4) + 1, 10
    else:
        number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"part {number} of {count} parts")
    return faults[number - 1 :: count]


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """That many copies of the tree, for one process each."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for i in range(count):
            root = Path(folder) / str(i)
            root.mkdir()
            copy_tree(root)
            free.put(root)
        yield free


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="run faults whose names contain one of these; default: all")
    parser.add_argument("--part", metavar="I/N", help='the Ith of N parts, or "today" for one by the date')
    parser.add_argument("--processes", type=int, default=min((os.cpu_count() or 1) + 1, 4))
    parser.add_argument("--without", action="store_true", help="run the tests without the faults")
    parser.add_argument("--table", action="store_true", help="write README.md and run nothing")
    args = parser.parse_args(arguments)
    faults = read_faults()
    if args.table:
        (HERE / "README.md").write_text(table(faults), "utf-8")
        return 0
    chosen = [fault for fault in faults if not args.names or any(part in fault.name for part in args.names)]
    if args.part:
        try:
            chosen = part_of(chosen, args.part)
        except ValueError as error:
            parser.error(f"--part {args.part}: {error}")
    if args.without:
        chosen = list({(fault.test, fault.k): fault for fault in chosen}.values())
    attempt, good = (try_without, "passed") if args.without else (try_fault, "caught")

    def run_one(fault: Fault) -> str:
        root, start = free.get(), time.perf_counter()
        try:
            result = attempt(fault, root)
        finally:
            free.put(root)
        print(f"{fault.name}: {result} ({time.perf_counter() - start:.0f} s)", flush=True)
        return result

    processes = max(1, min(args.processes, len(chosen)))
    with copies(processes) as free, ThreadPoolExecutor(processes) as pool:
        results = list(pool.map(run_one, chosen))
    print(f"{results.count(good)} of {len(chosen)} {good}")
    return 0 if chosen and results.count(good) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
