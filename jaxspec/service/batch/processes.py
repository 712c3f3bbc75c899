"""Replicas in processes of this machine, which receive rows through a socket and send back answers."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import Any

from jaxspec.errors import one_line
from jaxspec.interpreter import python_interpreter
from jaxspec.service.batch.devices import child_environment
from jaxspec.service.batch.replica import Message, Refused, Replica, Work, messages
from jaxspec.service.rows import Row

_PROGRAM = "import sys; from jaxspec.service.batch.processes import main; main(int(sys.argv[1]))"
_SECONDS_TO_END = 10.0
_MAX_OUTPUT = 2**16


class ProcessReplica(Replica):
    """A replica in a child process."""

    def __init__(self, environment: Mapping[str, str], work: Work):
        """Starts it.

        Args:
          environment: variables to add to this process's own.
          work: what it is to do; must be picklable.
        """
        super().__init__()
        self._connection, theirs = Pipe()
        self._output = TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [python_interpreter(), "-P", "-c", _PROGRAM, str(theirs.fileno())],
                env=child_environment(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self._send(work)

    def send(self, row: Row | None) -> None:
        self._send(row)

    def messages(self) -> Iterator[Message]:
        with suppress(EOFError, OSError):
            while True:
                yield self._connection.recv()

    def last_output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        # pread keeps the file position, which the process shares and writes at.
        text = os.pread(self._output.fileno(), min(size, _MAX_OUTPUT), max(size - _MAX_OUTPUT, 0))
        return text.decode("utf-8", "replace").strip()

    def cause_of_death(self) -> str:
        self._wait()
        status = self._process.poll()
        words = self.last_output().splitlines()
        self._kill()
        if status is None:
            how = "it hangs"
        else:
            how = f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.strsignal(-status)}"
        return one_line(f"{how}; its last words: {words[-1]}" if words else how)

    def close(self) -> None:
        if self.slots and not self.pending:
            self._wait()
        self._kill()

    def _wait(self) -> None:
        """Waits up to `_SECONDS_TO_END` seconds for the process to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _send(self, message: Work | Row | None) -> None:
        with suppress(OSError):  # its listener notices that it is dead
            self._connection.send(message)


def main(descriptor: int) -> None:
    """Runs a replica. It ends after its last row, or immediately if the parent process ends.

    Args:
      descriptor: number of the socket's file descriptor.
    """
    connection = Connection(descriptor)
    received: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    for message in messages(received.get(), iter(received.get, None)):
        connection.send(message)
        if isinstance(message, Refused):
            sys.exit(message.problem)


def _receive(connection: Connection, received: SimpleQueue[Any]) -> None:
    """Reads continuously, so that the parent's writes never block and its end is noticed at once."""
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
