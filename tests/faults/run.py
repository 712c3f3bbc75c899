"""Puts every fault of `faults.toml` into a copy of the working tree and runs the test that is to notice.

    python tests/faults/run.py                 all of them, a quarter of an hour or more
    python tests/faults/run.py pages "a draft" those whose names contain one of these
    python tests/faults/run.py --without       the same tests without the faults: they must pass
    python tests/faults/run.py --table         writes README.md anew and runs nothing

Exits with 1 if a fault is not caught, or its text has changed and it cannot be put in.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT = 180
"""Seconds that one test may take: a hang is a failure, too."""


@dataclass(frozen=True)
class Fault:
    """A wrong program, and who is to notice.

    Attributes:
      name: what it does wrong.
      file: where, from the root.
      before, after: the text that is replaced, which the file holds once, and what by.
      test: a file of tests, from the root.
      k: pytest's `-k`; all of the file if empty.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    k: str = ""

    def apply(self, root: Path) -> str:
        """Puts it into the file under `root` and returns the text that was there.

        Raises:
          ValueError: the file is gone, or does not hold `before` exactly once.
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
    """Copies what git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)


def run_test(fault: Fault, root: Path) -> tuple[int, str]:
    """The exit status of the fault's tests under `root`, and what they printed."""
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-p", "no:cacheprovider", fault.test]
    command += [f"--timeout={TIME_LIMIT}", "--timeout-method=thread"]
    command += ["-k", fault.k] if fault.k else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        # A fault of the same length, put in within the same second, would not look like a change.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def try_fault(fault: Fault, root: Path) -> str:
    """What came of it: "caught", or why not."""
    try:
        text = fault.apply(root)
    except ValueError as error:
        return f"does not apply: {error}"
    try:
        status, printed = run_test(fault, root)
    finally:
        (root / fault.file).write_text(text, "utf-8")
    # 1 is that tests ran and failed; a file that cannot be imported or a name that selects nothing is 2 to 5.
    if status == 1:
        return "caught"
    return f"NOT CAUGHT (pytest ended with {status})\n{'' if status == 0 else printed[-2000:]}".rstrip()


def try_without(fault: Fault, root: Path) -> str:
    """What came of the fault's tests without it: "passed", or what they printed."""
    status, printed = run_test(fault, root)
    return "passed" if status == 0 else f"FAILED (pytest ended with {status})\n{printed[-2000:]}".rstrip()


def table(faults: list[Fault]) -> str:
    """The page of all faults."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    rows = [f"| {cell(f.name)} | `{f.file}` | {cell(_test_of(f))} |" for f in faults]
    return "\n".join(
        [
            "# Deliberate faults",
            "",
            f"Ways in which the engine could be wrong, {len(faults)} of them, each a patch in `faults.toml`,",
            "and the test that fails with it.",
            "`python tests/faults/run.py` puts one after the other into a copy and runs its test.",
            "`test_faults.py`, in every run of the suite, checks that all can be put in.",
            "This page is made by `run.py --table`.",
            "",
            "| the fault | where | noticed by |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _test_of(fault: Fault) -> str:
    file = fault.test.removeprefix("tests/")
    return f"`{file}`" + (f' `-k "{fault.k}"`' if fault.k else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of the names of those to run; all by default")
    parser.add_argument("--without", action="store_true", help="run the tests without the faults")
    parser.add_argument("--table", action="store_true", help="write README.md and run nothing")
    args = parser.parse_args(arguments)
    faults = read_faults()
    if args.table:
        (HERE / "README.md").write_text(table(faults), "utf-8")
        return 0
    chosen = [fault for fault in faults if not args.names or any(part in fault.name for part in args.names)]
    if args.without:
        chosen = list({(fault.test, fault.k): fault for fault in chosen}.values())
    attempt, good = (try_without, "passed") if args.without else (try_fault, "caught")
    results = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder)
        copy_tree(root)
        for fault in chosen:
            start = time.perf_counter()
            results.append(attempt(fault, root))
            print(f"{fault.name}: {results[-1]} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{results.count(good)} of {len(chosen)} {good}")
    return 0 if chosen and results.count(good) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
