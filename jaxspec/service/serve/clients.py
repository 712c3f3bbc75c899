"""Reading a client's request, and noticing that the client has gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.service.openai import RequestError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection before its answer was there."""


async def read_json(request: Request, most: int) -> Any:
    """The body of a request, parsed.

    Args:
      most: the most bytes.

    Raises:
      RequestError: it is no JSON, is not sent as such, or is too long.
      ClientDisconnect: the client has gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Other types are what a web page may send without asking.
        raise RequestError("Content-Type must be application/json", status=415)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RequestError(f"the body is longer than {most} bytes", code="body_too_long", status=413)
        parts.append(part)
    try:
        return json.loads(b"".join(parts).decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does some work; cancels it if the client goes away.

    Args:
      receive: of a request whose body has been read.

    Raises:
      ClientGoneError: it has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, which end with the client.

    Attributes:
      events: the events, closed whatever happens.
      held: what to give back afterwards.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Mapping[str, Any] | None], held: ExitStack):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # With the client, nobody is left to be told.
        with self.held, suppress(ClientGoneError):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events) as events:
            async for event in events:
                text = "[DONE]" if event is None else json.dumps(event, ensure_ascii=False, allow_nan=False)
                body = f"data: {text}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
