"""The listener of the web page: off unless it has an address and a token.

On loopback it is plain HTTP. Elsewhere it needs the certificate of the coordinator
(`ROLLPACKER_SECURITY_*`) and speaks TLS; what keeps strangers out is the token.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.security import Security, is_loopback
from rollpacker.tasks import end_tasks
from services.coordinator.runs import Runs
from services.coordinator.web.app import make_app
from services.coordinator.web.views import Views
from services.coordinator.workers import WorkerRegistry

_LEAST_TOKEN = 16  # characters
_GRACE_SECONDS = 1
_log = logging.getLogger(__name__)


async def serve_web(
    address: str, token_file: Path | None, runs: Runs, workers: WorkerRegistry
) -> None:
    """Answer until cancelled; without an address only wait.

    Raises InvalidArgumentError (web_address, web_token_file) for settings that will not do.
    """
    if not address:
        await asyncio.Event().wait()
    token = _read_token(token_file)
    options = _tls(address)
    listener = _listen(address)
    config = uvicorn.Config(
        make_app(Views(runs, workers), token),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        **options,
    )
    server = _Server(config)
    scheme = "https" if options else "http"
    host, port = listener.getsockname()[:2]
    _log.info("web page on %s://%s:%d/#token=...", scheme, host, port)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
        raise RuntimeError("the web server has ended by itself")
    finally:
        server.should_exit = True
        await asyncio.wait([serving], timeout=2 * _GRACE_SECONDS)
        await end_tasks(serving)
        listener.close()


class _Server(uvicorn.Server):
    """The signals of this process belong to `rollpacker.rpc.server.serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _read_token(path: Path | None) -> str:
    if path is None:
        raise InvalidArgumentError.field(
            "web_token_file", "is not set; name a file with the token that readers must know"
        )
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError.field("web_token_file", f"cannot be read: {error}") from error
    if len(token) < _LEAST_TOKEN:
        raise InvalidArgumentError.field(
            "web_token_file",
            f"{path} holds {len(token)} characters, needed are {_LEAST_TOKEN}; for example"
            " `openssl rand -hex 24`",
        )
    return token


def _tls(address: str) -> dict[str, Any]:
    security = Security.from_environment()
    if is_loopback(address):
        return {}
    if not security.uses_tls:
        raise InvalidArgumentError.field(
            "web_address",
            f"{address} is not loopback and there is no certificate; listen on 127.0.0.1 and reach"
            " it by ssh -L, or set ROLLPACKER_SECURITY_CERTIFICATE_FILE and its companions",
        )
    return {
        "ssl_certfile": str(security.certificate_file),
        "ssl_keyfile": str(security.key_file),
    }


def _listen(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise InvalidArgumentError.field(
            "web_address", f"{address!r} is not host:port; give for example 127.0.0.1:7780"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        raise InvalidArgumentError.field(
            "web_address", f"{address} cannot be taken ({error}); choose another port"
        ) from error
