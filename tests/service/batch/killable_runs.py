"""Runs of `jaxspec batch` that can be killed, each forked from one process that has imported it.

A line of stdin is {"arguments": [...], "seconds": when to kill it, or null}. The first line of stdout is
"ready", the others are exit statuses, negative for a signal. With "fake" as its argument, runs have an
engine without a model.
"""

import json
import os
import signal
import sys
import time
import traceback

from fake_engine import FakeEngine

from jaxspec.commands import batch, batch_job


def main(is_fake):
    if is_fake:
        batch_job.load = lambda config, **options: FakeEngine(seconds=0.004)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)


def run(arguments, seconds):
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        try:
            os._exit(batch.main(arguments))
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
