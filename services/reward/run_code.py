"""The HTTP side door: `POST /run_code` in SandboxFusion's shape, for tools that speak no gRPC.

Off unless an address is set, and then with a token. A program runs in the sandbox, the slots and
the line of the graders, so it has all their limits. What is not offered is refused by name:
languages other than Python, files to bring or to fetch.

    in    {code, language, run_timeout, memory_limit_MB, stdin}; compile_timeout is ignored
    out   {status, message, compile_result: null, run_result, executor_pod_name: null, files: {}}

status is Success (exit code 0), Failed, or SandboxError, which comes with HTTP 503 and says nothing
about the program: try again. run_timeout is CPU time here, in seconds, and at most the service's
own limit. A traceback stands in stderr, of which the last 64 KiB are kept.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.security import Security
from services.reward.graders.grader import GraderUnavailableError, ProgramOutcome, ProgramTask
from services.reward.http_json import Answer, JsonServer, bad_request
from services.reward.worker_pool import SlotsBusyError, WorkerPool
from services.reward.worker_process import WorkerLostError

PATH = "/run_code"
MOST_BODY_BYTES = 4 << 20
_MOST_CALLERS = 256
_POLL_SECONDS = 0.05  # until a door that closes has noticed
_LANGUAGES = ("python", "python3")
_DEFAULT_SECONDS = 10.0
_MIB = 1 << 20
_NO_LIMIT_MIB = 1 << 20
_REFUSED = ("files", "fetch_files")
_TOO_MUCH = {"output": "killed: too much output", "threads": "killed: too many threads"}


class SideDoor:
    """Open while used as a context manager, in the event loop of the pool."""

    def __init__(self, address: str, token: str, pool: WorkerPool, most_seconds: float) -> None:
        """Raises InvalidArgumentError for an address that would let strangers in."""
        security = Security.from_environment()
        security.check_address(address)
        self._pool, self._most_seconds = pool, most_seconds
        self._loop = asyncio.get_running_loop()
        listener = _listener(address, security)
        self.port = int(listener.getsockname()[1])
        self._server = JsonServer(
            listener,
            token,
            {PATH: self._answer},
            most_body_bytes=MOST_BODY_BYTES,
            most_connections=_MOST_CALLERS,
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_SECONDS], daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.socket.close()

    def _answer(self, body: Any) -> Answer:
        """In a thread of the caller's; the program runs by way of the event loop."""
        try:
            task = read_task(body, self._most_seconds)
        except ValueError as error:
            return bad_request(str(error))
        try:
            run = asyncio.run_coroutine_threadsafe(self._pool.run(task), self._loop)
            return HTTPStatus.OK, answer(run.result())
        except (SlotsBusyError, WorkerLostError, GraderUnavailableError) as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, _message("SandboxError", str(error), None)


def read_task(body: Any, most_seconds: float) -> ProgramTask:
    """What a request asks for. Raises ValueError, which names field, value and fix."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise ValueError('code: is no text; send {"code": "...", "language": "python"}')
    language = body.get("language")
    if language not in _LANGUAGES:
        raise ValueError(f"language: {language!r} is not offered; send python")
    for name in _REFUSED:
        if body.get(name):
            raise ValueError(f"{name}: is not offered; leave it out, or put it into the program")
    stdin = body.get("stdin") or ""
    if not isinstance(stdin, str):
        raise ValueError(f"stdin: {stdin!r:.40} is no text")
    for name, text in (("code", body["code"]), ("stdin", stdin)):
        _check_unicode(name, text)
    seconds = _number(body, "run_timeout", _DEFAULT_SECONDS)
    memory = _number(body, "memory_limit_MB", -1)
    if seconds <= 0:
        raise ValueError(f"run_timeout: {seconds} is not above 0")
    mib = memory if 0 < memory < _NO_LIMIT_MIB else _NO_LIMIT_MIB
    return ProgramTask(body["code"], stdin, min(seconds, most_seconds), round(mib * _MIB))


def answer(outcome: ProgramOutcome) -> dict[str, Any]:
    """The body of a response."""
    late = outcome.ended_by in ("cpu", "wall")
    code: int | None = outcome.code
    if outcome.ended_by == "exit" and outcome.code != 0:
        code = 1  # the sandbox's own codes are nobody's business
    stderr = outcome.stderr + _TOO_MUCH.get(outcome.ended_by, "")
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": outcome.wall_seconds,
        "return_code": None if late else code,
        "stdout": outcome.stdout,
        "stderr": stderr,
    }
    return _message("Success" if code == 0 and not late else "Failed", "", result)


def _message(status: str, message: str, result: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }


def _check_unicode(name: str, text: str) -> None:
    """JSON can hold half a character, an escape such as \\ud800 alone; a program cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is half of a surrogate pair; send whole ones"
        ) from error


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {value!r:.40} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: {value!r:.40} is no finite number")
    return number


def _listener(address: str, security: Security) -> socket.socket:
    """TLS where the service has it. Raises InvalidArgumentError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgumentError.field("run_code_address", f"{address!r} is not host:port")
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), int(port)), family=family)
    except (OSError, OverflowError) as error:
        raise InvalidArgumentError.field("run_code_address", f"{address}: {error}") from error
    if security.certificate_file is None or security.key_file is None:
        return listener
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(security.certificate_file, security.key_file)
    return context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
