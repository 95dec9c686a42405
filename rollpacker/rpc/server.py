"""A gRPC server with health, reflection, the error table and an orderly end.

`serve` is the whole life of a service process: bind, report the address, become SERVING, wait for
SIGTERM or SIGINT, become NOT_SERVING, let calls finish for a moment, stop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from rollpacker.observability import log_context
from rollpacker.observability.rpc_metrics import measured
from rollpacker.observability.tracing import server_interceptors, stop_tracing
from rollpacker.rpc import errors
from rollpacker.rpc.around import AroundInterceptor
from rollpacker.rpc.security import Security, TokenInterceptor, TokenTable
from rollpacker.tasks import end_tasks

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_GRACE_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # gRPC cancels calls at random from 1,000 on that were not taken up yet; a burst is no attack.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)
_log = logging.getLogger(__name__)


class RpcServer:
    """One server. `register` is called with the grpc.aio server, once per servicer."""

    def __init__(
        self,
        address: str,
        service_names: Sequence[str],
        register: Callable[[grpc.aio.Server], None],
    ) -> None:
        """Raises InvalidArgumentError for an address beyond loopback without TLS and tokens."""
        security = Security.from_environment()
        security.check_address(address)
        interceptors: list[grpc.aio.ServerInterceptor] = [_ErrorInterceptor()]
        if security.accepted_tokens_file is not None:
            interceptors.insert(0, TokenInterceptor(TokenTable(security.accepted_tokens_file)))
        interceptors = [AroundInterceptor(measured), *server_interceptors(), *interceptors]
        self._server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
        self._health = HealthServicer()
        self._names = tuple(service_names)
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )
        if security.uses_tls:
            bound = self._server.add_secure_port(address, security.server_credentials())
        else:
            bound = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else _with_port(address, bound)

    async def start(self) -> None:
        """Begin to answer; still NOT_SERVING until `set_serving(True)`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers for the server and each of its services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def set_part_serving(self, name: str, serving: bool) -> None:
        """What grpc.health.v1 answers for a part of a service, for example "Service/code"."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Refuse new calls, let running ones finish for a moment, then cancel them."""
        await self.set_serving(False)
        await self._server.stop(_GRACE_SECONDS)


async def serve(
    server: RpcServer,
    *,
    address_file: Path | None = None,
    background: Sequence[Callable[[], Awaitable[None]]] = (),
) -> None:
    """Run until SIGTERM or SIGINT, or until a background task fails (its error is raised)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    tasks = [asyncio.ensure_future(start()) for start in background]
    await server.set_serving(True)
    if address_file:
        _write_whole(address_file, server.address)
    _log.info("serving on %s", server.address)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not stopped:
                task.result()
    finally:
        await end_tasks(*tasks, stopped)
        await server.stop()
        await asyncio.to_thread(stop_tracing)


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses by the table of `rollpacker.rpc.errors`."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, details.method, handler.request_deserializer),
                None,
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, details.method, handler.request_deserializer),
                None,
                handler.response_serializer,
            )
        return handler  # reflection streams both ways


def _unary(behaviour: Any, method: str, parse: Any) -> Any:
    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_parsed(parse, request, method), context)
        except errors.ServiceError as error:
            await _abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001  the caller gets INTERNAL, the log the traceback
            await _abort(context, _bug(method))

    return call


def _stream(behaviour: Any, method: str, parse: Any) -> Any:
    async def call(
        request: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for message in behaviour(_parsed(parse, request, method), context):
                yield message
        except errors.ServiceError as error:
            await _abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:  # noqa: BLE001  the caller gets INTERNAL, the log the traceback
            await _abort(context, _bug(method))

    return call


def _parsed(parse: Any, request: bytes, method: str) -> Any:
    """The request as a message. Raises InvalidArgumentError where it is none.

    The log lines of its call are about what it names.
    """
    try:
        message = parse(request)
    except DecodeError as error:
        raise errors.InvalidArgumentError(
            "MALFORMED_REQUEST", f"the request of {method} is not its message; check the protos"
        ) from error
    log_context(**_about(message))
    return message


def _about(request: Any) -> dict[str, str | int]:
    """The run, step and prompt that a request names."""
    place = getattr(request, "draw", None) or request
    values = {
        "run": getattr(request, "run_id", ""),
        "step": getattr(request, "step", ""),
        "prompt": getattr(place, "prompt_id", ""),
    }
    return {name: value for name, value in values.items() if value != ""}


def _bug(method: str) -> errors.InternalError:
    """The remedy for an unforeseen exception: log it here, tell the caller where to look."""
    _log.exception("%s failed", method)
    return errors.InternalError("BUG", f"{method} failed; the service's log has the traceback")


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.ServiceError) -> None:
    await context.abort(error.code, error.message, errors.to_trailing_metadata(error))
