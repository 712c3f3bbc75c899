"""Runs the application until a signal ends it, and lets answers that have begun come to their end."""

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxspec.engine import AsyncEngine

_BACKLOG = 2048


def run_server(app: FastAPI, engine: AsyncEngine, listening: socket.socket, *, grace: float) -> int | None:
    """Serves until SIGTERM or Ctrl-C; returns the number of the signal, None if it ended otherwise.

    Then no connection is accepted any more, and answers have `grace` seconds to end before they are aborted.

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
        timeout_graceful_shutdown=int(grace) + 5,
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        abort = asyncio.ensure_future(self._abort_later())
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._grace)
        await self._engine.close()
