"""Runs of the batch script that can be killed, each forked from one process that has imported it.

A line of stdin is {"arguments": [...], "seconds": when to kill it, or null}. The first line of stdout is
"ready", the others are exit statuses, negative for a signal. With "fake" as its argument, runs have an
engine without a model.
"""

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from fake_engine import FakeEngine

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_batch.py"


def main(is_fake):
    spec = importlib.util.spec_from_file_location("generate_batch", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if is_fake:
        script.load = lambda config, **options: FakeEngine(seconds=0.004)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(script, **json.loads(line)), flush=True)


def run(script, arguments, seconds):
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        try:
            os._exit(script.main(arguments))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    if seconds is not None:
        end = time.monotonic() + seconds
        while (
            time.monotonic() < end
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)  # one that has ended is still there until it is waited for
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main(sys.argv[1] == "fake")
