"""Routes, the token, and the headers of every answer.

    /, /page.js, /page.css, /report.css     open: the same for everybody, nothing of a run in it
    /api/...                                only with `Authorization: Bearer TOKEN`

Only GET and HEAD exist. No cookie is set, so no other page can act for its visitor.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollpacker.rpc.errors import NotFoundError, ServiceError
from services.coordinator.outputs.report import report_style
from services.coordinator.outputs.run_directory import RunDirectoryError
from services.coordinator.web.views import Views

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NUMBER = re.compile(r"[0-9]{1,9}")
_log = logging.getLogger(__name__)


def make_app(views: Views, token: str) -> ASGIApp:
    """The whole site. `token`: what readers must know."""
    api = Starlette(routes=_api(views), exception_handlers=_FAILURES)
    routes = [
        _static("/", "index.html", "text/html"),
        _static("/page.js", "page.js", "text/javascript"),
        _static("/page.css", "page.css", "text/css"),
        _fixed("/report.css", report_style(), "text/css"),
        Mount("/api", _TokenGate(api, token)),
    ]
    return _Headers(Starlette(routes=routes, exception_handlers=_FAILURES))


def _api(views: Views) -> list[Route]:
    async def samples(request: Request) -> Any:
        start = _number("start", request.query_params.get("start", "0"))
        return await views.samples(request.path_params["run_id"], _step(request), start)

    async def round_(request: Request) -> Any:
        return await views.round(request.path_params["run_id"], _step(request))

    return [
        _json("/runs", lambda _: views.runs()),
        _json("/workers", lambda _: views.workers()),
        _json("/runs/{run_id}", lambda request: views.now(request.path_params["run_id"])),
        _json(
            "/runs/{run_id}/overview", lambda request: views.overview(request.path_params["run_id"])
        ),
        _json("/runs/{run_id}/rounds/{step}", round_),
        _json("/runs/{run_id}/samples/{step}", samples),
    ]


def _json(path: str, view: Callable[[Request], Awaitable[Any]]) -> Route:
    async def answer(request: Request) -> Response:
        return JSONResponse(await view(request))

    return Route(path, answer)


def _step(request: Request) -> int:
    return _number("step", request.path_params["step"])


def _number(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise HTTPException(400, f"{name}: {text[:40]!r} is not a number of 1 to 9 digits")
    return int(text)


def _static(path: str, name: str, media_type: str) -> Route:
    content = resources.files(__package__).joinpath("static", name).read_text("utf-8")
    return _fixed(path, content, media_type)


def _fixed(path: str, content: str, media_type: str) -> Route:
    async def answer(_request: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(path, answer)


async def _failed(_request: Request, error: Exception) -> Response:
    """What went wrong, in words; the page shows them."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    if isinstance(error, NotFoundError):
        return JSONResponse({"error": error.message}, 404)
    _log.warning("the page cannot be served: %s", error)
    return JSONResponse({"error": str(error)}, 503)


_FAILURES: Any = {
    HTTPException: _failed,
    ServiceError: _failed,
    RunDirectoryError: _failed,
    OSError: _failed,
}


class _TokenGate:
    """Lets only calls with the token through; compares hashes, in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            given = hashlib.sha256(sent.removeprefix(b"Bearer ")).digest()
            if not hmac.compare_digest(given, self._digest):
                answer = JSONResponse({"error": "wrong token, or none"}, 401)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Headers:
    """Adds the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_headers)
