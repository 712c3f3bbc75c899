"""The HTTP application: OpenAI's endpoints over an engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jaxspec.engine import AsyncEngine, EngineError, QueueFullError
from jaxspec.service.openai import (
    CHAT,
    COMPLETIONS,
    DEFAULTS,
    Endpoint,
    RequestError,
    error_object,
    read_body,
)
from jaxspec.service.serve import schemas
from jaxspec.service.serve.answering import AnswerError, Answering
from jaxspec.service.serve.clients import ClientGoneError, EventStream, read_json, unless_gone
from jaxspec.service.serve.guard import Guard
from jaxspec.service.serve.metrics import Metrics

MAX_BODY = 4 * 2**20
"""Bytes of a body, unless told otherwise: more than the longest context has."""
_THREADS = 64
"""Threads that turn prompts into ids. One waits as long as programs for log-probabilities are compiled."""


@dataclass(frozen=True)
class Access:
    """Who may ask for how much.

    Attributes:
      api_key: what every request but those for /health must bring; None for nothing.
      cors_origins: web pages that may send requests, "*" for all; empty for none.
      max_body: the most bytes of a body.
      max_prompt: the most tokens of a prompt; None for as many as the engine takes.
    """

    api_key: str | None = None
    cors_origins: Collection[str] = ()
    max_body: int = MAX_BODY
    max_prompt: int | None = None


def make_app(
    engine: AsyncEngine, model: str, access: Access = Access(), sampling: Mapping[str, Any] = DEFAULTS
) -> FastAPI:
    """The application that serves an engine.

    Its shutdown closes the engine. At most `engine.max_unfinished` answers are in work at once; what comes
    then is refused with status 429.

    Args:
      model: the name that requests must give.
      sampling: fields of `SamplingParams` for requests that do not set them, such as
        `generation_defaults` gives; their temperature is 1 if it is not among them.
    """
    metrics = Metrics(engine.engine, model)
    answering = Answering(engine, access.max_prompt, {**DEFAULTS, **sampling})
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "jaxspec-prompts"))
        yield
        await engine.close()

    app = FastAPI(
        title="jaxspec",
        version="1",  # of the API, not of the program
        description=f"OpenAI's API over {model}, decoded speculatively.",
        lifespan=lifespan,
        docs_url=None,  # the page would load scripts from elsewhere
        redoc_url=None,
    )

    async def answer(request: Request, endpoint: Endpoint) -> Response:
        asked = read_body(await read_json(request, access.max_body), endpoint)
        if asked.model != model:
            raise RequestError(
                f"model: there is no {asked.model[:200]!r} here; this server has {model!r}",
                "model",
                code="model_not_found",
                status=404,
            )
        with answering.reserve(asked) as held:
            requests = await unless_gone(request.receive, answering.requests(asked))
            if asked.is_streamed:
                return EventStream(answering.events(asked, requests), held.pop_all())
            body = await unless_gone(request.receive, answering.whole(asked, requests))
            return JSONResponse(body)

    @app.post(CHAT, **schemas.route(CHAT))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, CHAT)

    @app.post(COMPLETIONS, **schemas.route(COMPLETIONS))
    async def completions(request: Request) -> Response:
        return await answer(request, COMPLETIONS)

    described = {
        "id": model,
        "object": "model",
        "created": started,
        "owned_by": "jaxspec",
        "max_model_len": engine.engine.max_model_len,
    }

    @app.get("/v1/models", **schemas.MODELS)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    @app.get("/v1/models/{name:path}", **schemas.MODEL)
    async def retrieve_model(name: str) -> Response:
        if name != model:
            raise RequestError(
                f"model: there is no {name[:200]!r} here; this server has {model!r}",
                "model",
                code="model_not_found",
                status=404,
            )
        return JSONResponse(described)

    @app.get("/health", **schemas.HEALTH)
    async def health() -> Response:
        if (error := engine.engine.core.error) is not None:
            raise error
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", **schemas.METRICS)
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _handle_errors(app, metrics, model)
    app.add_middleware(Guard, api_key=access.api_key, origins=access.cors_origins)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    schemas.describe(app, model=model, has_key=access.api_key is not None)
    return app


def _handle_errors(app: FastAPI, metrics: Metrics, model: str) -> None:
    """Makes every error OpenAI's object."""

    def refuse(status: int, error: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        metrics.refused.labels(model, str(status)).inc()
        return JSONResponse(error, status, headers)

    @app.exception_handler(RequestError)
    async def bad_request(request: Request, error: RequestError) -> Response:
        return refuse(error.status, error_object(str(error), field=error.field, code=error.code))

    @app.exception_handler(QueueFullError)
    async def queue_full(request: Request, error: QueueFullError) -> Response:
        told = error_object(str(error), kind="rate_limit_error", code="queue_full")
        return refuse(429, told, {"retry-after": "1"})

    @app.exception_handler(AnswerError)
    @app.exception_handler(EngineError)
    async def no_answer(request: Request, error: Exception) -> Response:
        return refuse(503, error_object(str(error), kind="server_error"))

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # to nobody

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return refuse(error.status_code, error_object(message), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> Response:
        return refuse(500, error_object("the server has made a mistake", kind="server_error"))
