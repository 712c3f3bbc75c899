"""Check and time engines over several GPUs, compared with one GPU.

    python scripts/bench_devices.py [--devices 2] [--only PART,PART,...] [--json FOLDER]

Parts, each in its own process, so that a failure does not affect the others:

    check          compares greedy and sampled tokens over all devices with those on one, for small random
                   networks of several families, drafters and kinds of attention in float32
    llama3-8b      bench_step.py on one device and over all, at batch 1, 8 and 32
    gpt-oss-20b    the same at batch 1 and 32
    llama3-70b     over all devices only, at batch 1 and 8
    whole-drafter  llama3-8b and llama3-70b with the whole drafter on every device

XLA_FLAGS are passed on. Without --only, all parts run.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# NCCL fails on machines where NVLink's multicast is only partly available.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

_HERE = Path(__file__).parent
_STEP = "--k 3 --acceptance 3.0 --new-tokens 512"
PARTS: dict[str, list[tuple[str, bool]]] = {
    "llama3-8b": [
        ("--shape llama3-8b --batch 1,8,32", False),
        ("--shape llama3-8b --batch 1,8,32", True),
    ],
    "gpt-oss-20b": [
        ("--shape gpt-oss-20b --batch 1,32", False),
        ("--shape gpt-oss-20b --batch 1,32", True),
    ],
    "llama3-70b": [("--shape llama3-70b --batch 1,8", True)],
    "whole-drafter": [
        ("--shape llama3-8b --batch 1,32 --whole-drafter", True),
        ("--shape llama3-70b --batch 1 --whole-drafter", True),
    ],
}
"""For each part, runs of bench_step.py: its options, and whether it runs over all devices."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="devices to run over")
    parser.add_argument("--only", default="check," + ",".join(PARTS), metavar="PART,...", help="parts to run")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="folder for results of bench_step.py")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS", help="time limit of a process")
    args = parser.parse_args(arguments)
    failed = []
    for part in args.only.split(","):
        if part == "check":
            commands = [[str(_HERE / "check_devices.py"), "--devices", str(args.devices)]]
        elif part in PARTS:
            commands = [_step(args, options, over_all) for options, over_all in PARTS[part]]
        else:
            parser.error(f"--only: unknown part {part!r}; known: check, {', '.join(PARTS)}")
        for command in commands:
            if not _run(command, args.timeout):
                failed.append(part)
    print("failed: " + ", ".join(failed) if failed else "every part ran", flush=True)
    return bool(failed)


def _step(args: argparse.Namespace, options: str, over_all: bool) -> list[str]:
    devices = args.devices if over_all else 1
    command = [str(_HERE / "bench_step.py"), *options.split(), *_STEP.split()]
    command += ["--tensor-parallel", str(devices)]
    if args.json:
        shape = options.split()[1]
        whole = "-whole-drafter" if "--whole-drafter" in options else ""
        command += ["--json", str(args.json / f"step-{shape}-tp{devices}{whole}.json")]
    return command


def _run(command: list[str], timeout: int) -> bool:
    print("\n$ python", *command, flush=True)
    begin = time.perf_counter()
    done: Any = None
    try:
        done = subprocess.run([sys.executable, *command], check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"took more than {timeout} s", flush=True)
    print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    return done is not None and done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
