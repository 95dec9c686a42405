"""A small HTTP server for JSON: POST only, a bearer token always, bodies up to a limit.

The judge worker and the side door answer through it. A connection carries one request and is
closed; each has a thread of its own, of which there are at most so many: further callers get 503 at
once. A request is refused before its body is read when its path, token or length is wrong, and must
have arrived within a deadline, however its bytes trickle. Nothing of a request is logged.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_READ_SECONDS = 60.0  # until a request has arrived, and until an answer has been taken
_BUSY_SECONDS = 1.0  # the server waits so long for a caller whom it refuses
_CONNECTIONS = 512
_MOST_DIGITS = 18  # of a length
_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n\r\n"
    b'{"error": "too many requests at the same time; try again"}'
)
_log = logging.getLogger(__name__)

Answer = tuple[int, Any]  # status, what becomes the JSON body
Route = Callable[[Any], Answer]  # takes the JSON body; runs in the thread of its connection


class JsonServer(ThreadingHTTPServer):
    """Serves `routes` on a socket that listens already. Run `serve_forever` in a thread."""

    daemon_threads = True

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        routes: Mapping[str, Route],
        *,
        most_body_bytes: int,
        most_connections: int = _CONNECTIONS,
        read_seconds: float = _READ_SECONDS,
    ) -> None:
        if not token:
            raise ValueError("token: is empty; every caller needs one")
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.token, self.routes, self.most_body_bytes = token, routes, most_body_bytes
        self.read_seconds = read_seconds
        self._free = threading.BoundedSemaphore(most_connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.settimeout(_BUSY_SECONDS)
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no news; the rest is a bug."""
        del request, client_address
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a request failed")


class _Arriving(io.RawIOBase):
    """The bytes of a request. Raises TimeoutError once the deadline is over."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.server.read_seconds))

    def do_POST(self) -> None:
        self._send(*self._answer())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the base
        _log.debug(format, *args)

    def _answer(self) -> Answer:
        authorization = self.headers.get("Authorization", "")
        expected = f"Bearer {self.server.token}"
        if not hmac.compare_digest(authorization.encode(), expected.encode()):
            return _refusal(HTTPStatus.UNAUTHORIZED, "send `Authorization: Bearer TOKEN`")
        route = self.server.routes.get(self.path)
        if route is None:
            known = ", ".join(self.server.routes)
            return _refusal(HTTPStatus.NOT_FOUND, f"there is no {self.path:.100}; known: {known}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return _refusal(HTTPStatus.LENGTH_REQUIRED, "Content-Length: is missing")
        if len(length) > _MOST_DIGITS:
            return bad_request(f"Content-Length: {length[:20]}... is no length; send the body's")
        if int(length) > self.server.most_body_bytes:
            most = self.server.most_body_bytes
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {most} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            return _refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}")
        return route(body)

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.connection.settimeout(self.server.read_seconds)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _refusal(status: HTTPStatus, message: str) -> Answer:
    return status, {"error": message}


def bad_request(message: str) -> Answer:
    """400; `message` names field, value and fix."""
    return _refusal(HTTPStatus.BAD_REQUEST, message)
