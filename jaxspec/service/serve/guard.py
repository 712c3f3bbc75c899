"""What a request must have before anybody looks at it: a key, if one is wanted, and no foreign web page."""

from collections.abc import Collection
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.service.openai import error_object

OPEN = ("/health",)
"""Paths that need no key."""


class Guard:
    """Refuses requests without the key, and those that a web page sends.

    A browser sends another site's requests to a local address, too, and a page whose name was made to mean
    this machine is no foreign one to it. Both come with the page's `Origin`.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, origins: Collection[str]):
        self._app, self._key, self._origins = app, api_key, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            message = f"requests of web pages are refused; --cors-origin {origin} would allow this page's"
            return JSONResponse(error_object(message, code="origin_not_allowed"), 403)
        if self._key is None or scope["path"] in OPEN:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        # In constant time, so that the time taken tells nothing of the key.
        if kind.lower() == "bearer" and compare_digest(key.strip().encode(), self._key.encode()):
            return None
        message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        error = error_object(message, kind="authentication_error", code="invalid_api_key")
        return JSONResponse(error, 401, {"www-authenticate": "Bearer"})
