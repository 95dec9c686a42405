"""Count, status and time of every call that a server answers, for Prometheus.

The interceptor stands outermost, so that refusals (a missing token) count too. A stream takes as
long as it is open. Methods are those that the server has; a call of another one is not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge, Histogram

_CALLS = Counter("rollpacker_rpc_calls", "calls answered, by status", ["method", "code"])
_SECONDS = Histogram(
    "rollpacker_rpc_seconds",
    "time of a call; of a stream, how long it was open",
    ["method"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
_RUNNING = Gauge("rollpacker_rpc_running", "calls under way", ["method"])


class MetricsInterceptor(grpc.aio.ServerInterceptor):
    """See the head of the file."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        for kind, wrap in _KINDS.items():
            if behaviour := getattr(handler, kind):
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                call = wrap(behaviour, details.method)
                return make(call, handler.request_deserializer, handler.response_serializer)
        return handler


def _single(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        with _measured(method, context):
            return await behaviour(request, context)

    return call


def _stream(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        with _measured(method, context):
            async for message in behaviour(request, context):
                yield message

    return call


_KINDS = {
    "unary_unary": _single,
    "stream_unary": _single,
    "unary_stream": _stream,
    "stream_stream": _stream,
}


@contextmanager
def _measured(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
    start = time.perf_counter()
    running = _RUNNING.labels(method)
    running.inc()
    cancelled = False
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        cancelled = True
        raise
    finally:
        running.dec()
        _SECONDS.labels(method).observe(time.perf_counter() - start)
        _CALLS.labels(method, "CANCELLED" if cancelled else _code(context)).inc()


def _code(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The status that the handler has set; gRPC keeps it as a number or as a member."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((c.name for c in grpc.StatusCode if c.value[0] == (code or 0)), "UNKNOWN")
