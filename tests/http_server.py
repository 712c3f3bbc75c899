"""A server over an engine of the tests, on a free port of this machine."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from tiny_engines import assert_idle

from jaxspec import AsyncEngine, Engine
from jaxspec.service.openai import DEFAULTS
from jaxspec.service.serve.app import Access, make_app

MODEL = "tiny"


class KeptEngine(AsyncEngine):
    """Leaves the engine, which other tests share, open."""

    async def close(self) -> None:
        pass


@contextmanager
def serving(
    engine: Engine, *, max_unfinished: int = 1024, sampling: Mapping[str, Any] = DEFAULTS, **access: Any
) -> Iterator[SimpleNamespace]:
    """The address of a server, and its client of the engine."""
    client = KeptEngine(engine, max_unfinished=max_unfinished)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = make_app(client, MODEL, Access(**access), sampling)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", backlog=2048))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{listening.getsockname()[1]}", engine=client, server=server
        )
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive()
    assert client.num_unfinished == 0
    assert_idle(engine)
