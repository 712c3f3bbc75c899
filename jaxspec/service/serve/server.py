"""Runs the application until a signal ends it, and lets answers that have begun come to their end."""

import asyncio
import os
import signal
import socket
import threading
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxspec.engine import AsyncEngine

_BACKLOG = 2048
_MARGIN = 5
"""Seconds after the grace for aborted answers to tell their clients."""
_EXIT = 2
"""Seconds for the process to end by itself after the server."""


def run_server(app: FastAPI, engine: AsyncEngine, listening: socket.socket, *, grace: float) -> int | None:
    """Serves until SIGTERM or Ctrl-C; returns the number of the signal, None if it ended otherwise.

    Then no connection is accepted any more, and answers have `grace` seconds to end before they are aborted.
    Programs that are still being compiled cannot be interrupted, and a process waits for them when it ends.
    So this one, which should have nothing else to do, is ended soon after the server, and at the latest
    `_MARGIN` seconds after the grace, with status 0 after SIGTERM and 130 after Ctrl-C.

    Args:
      listening: a bound socket, which is closed in the end.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        # Only what an aborted answer does not end, such as a client that reads nothing.
        timeout_graceful_shutdown=int(grace) + _MARGIN,
    )
    server = _Server(config, engine, grace)
    ended_by: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)

    # The server raises the signals that ended it once more when it has ended.
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ended_by[0] if ended_by else None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, grace: float):
        super().__init__(config)
        self._engine, self._grace = engine, grace
        self._has_ended = threading.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            status = 130 if sig == signal.SIGINT else 0
            threading.Thread(target=self._exit_later, args=(status,), daemon=True).start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        abort = asyncio.ensure_future(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()
            self._has_ended.set()

    def _exit_later(self, status: int) -> None:
        self._has_ended.wait(self._grace + _MARGIN)
        time.sleep(_EXIT)
        os._exit(status)

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._grace)
        await self._engine.close()
