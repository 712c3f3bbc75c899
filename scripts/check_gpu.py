"""Everything that must pass on a GPU before a new release of JAX or Triton is let in.

    python scripts/check_gpu.py [--only TEXT ...] [--processes 8] [--log FOLDER]

Runs, with the versions that are installed, the tests marked `gpu` (kernels, engines, training), whole answers
in exact mode in bfloat16, FP8 and INT4, and, if there are several GPUs, networks over two of them. It uses
those that CUDA_VISIBLE_DEVICES names. Prints the versions, then a line for each check; the exit status is 1
if any failed.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "flax", "optax", "numpy")
_TESTS = {"kernels": ["kernels"], "engines": ["attention", "drafters", "engine", "lab/training", "sampling"]}


class Check(NamedTuple):
    """A command below `python`, and the least number of GPUs that it needs."""

    name: str
    command: list[str]
    gpus: int = 1


def checks(processes: int) -> Iterator[Check]:
    """All checks, the quickest first."""
    for name, folders in _TESTS.items():
        tests = ["-m", "pytest", *(f"tests/{folder}" for folder in folders), "-m", "gpu and not slow"]
        tests += ["-n", str(processes), "--dist", "loadfile", "-o", "addopts=-v --tb=short"]
        yield Check(f"tests of {name}", tests)
    exact = ["scripts/check_exact.py", "--limit", "12", "--max-new-tokens", "48", "--only", "K = 4, batch 64"]
    for shape in ("smollm2-135m", "llama3-8b-fp8", "llama3-8b-int4"):
        yield Check(f"exact, {shape}", [*exact, "--shape", shape])
    over_two = [*exact, "--shape", "smollm2-135m", "--engine", "tensor_parallel=2"]
    yield Check("two GPUs, exact", over_two, gpus=2)
    yield Check("two GPUs", ["scripts/check_devices.py"], gpus=2)


def main(arguments: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    # The processes of a check share the GPU, and this one must not hold its memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    cards = _cards()
    print(", ".join(cards) or "no GPU")
    print(", ".join(f"{name} {_version(name)}" for name in _PACKAGES), flush=True)
    failed = not cards
    for check in checks(args.processes):
        if not any(text in check.name for text in args.only):
            continue
        if len(cards) < check.gpus:
            print(f"{check.name:22} not run: needs {check.gpus} GPUs", flush=True)
            continue
        begin = time.perf_counter()
        # Written as it comes: a run that is cut short still names what failed.
        log = args.log / (re.sub(r"\W+", "-", check.name) + ".txt")
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, *check.command]
            done = subprocess.run(
                command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        seconds = time.perf_counter() - begin
        failed |= done.returncode != 0
        verdict = "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"
        print(
            f"{check.name:22} {verdict:10} {seconds:5.0f} s  {_summary(log.read_text('utf-8'))}", flush=True
        )
    print(f"the output of every check: {args.log}")
    return int(failed)


def _cards() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [] if visible is None else [f"--id={visible}"]
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", *chosen]
        return subprocess.run(query, check=True, text=True, capture_output=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _summary(output: str) -> str:
    """What tests count, or the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    return (counts or lines or [""])[-1].strip("= ")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only checks whose name contains one of these"
    )
    parser.add_argument("--processes", type=int, default=8, help="of tests at a time")
    parser.add_argument(
        "--log", type=Path, metavar="FOLDER", help="for the output of every check (a new one in /tmp)"
    )
    args = parser.parse_args(arguments)
    args.log = args.log or Path(tempfile.mkdtemp(prefix="check-gpu-"))
    args.log.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
