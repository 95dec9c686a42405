"""Traces: what a step did, over all services, as one tree of spans.

    step --> round --> group --> GenerateGroup (at the replica)
       |        +----> score --> ScoreResponse (at the reward service)
       +-----> FinishStep -----> FinishStep (at the trainer)

The coordinator opens spans for its own work; a server opens one for every call. What a span
belongs to travels in the call's metadata (`traceparent`, W3C). Everything goes through the one
backend of the process: none (the default; then a span costs a comparison) or OpenTelemetry, which
is imported only when an endpoint is set and needs the extra `tracing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc.aio

from rollpacker.rpc.around import AroundInterceptor, status_name
from rollpacker.rpc.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rollpacker.observability.opentelemetry_backend import Backend

_OFF = nullcontext()
_backend: Backend | None = None


def set_up_tracing(service: str, endpoint: str, replica: str = "") -> None:
    """Send the spans of this process to an OTLP endpoint, "http://host:4317"; "" sends none.

    Call it before servers and channels are made. Raises InvalidArgumentError (trace_endpoint)
    where OpenTelemetry is not installed.
    """
    global _backend
    if not endpoint:
        return
    try:
        from rollpacker.observability.opentelemetry_backend import otlp_backend
    except ModuleNotFoundError as error:
        raise InvalidArgumentError.field(
            "trace_endpoint", f"needs {error.name}; pip install 'rollpacker[tracing]'"
        ) from error
    _backend = otlp_backend(service, endpoint, replica)


def use_backend(backend: Backend | None) -> None:
    """Another backend from now on: for tests. None switches tracing off."""
    global _backend
    _backend = backend


def stop_tracing() -> None:
    """Send what is left and switch tracing off."""
    global _backend
    if _backend is not None:
        _backend.close()
        _backend = None


def span(
    name: str, *, is_root: bool = False, **attributes: str | int
) -> AbstractContextManager[None]:
    """A part of what this task is doing, or the root of a new trace.

    An exception that leaves it marks it as failed.
    """
    return _OFF if _backend is None else _backend.span(name, attributes, is_root=is_root)


def server_interceptors() -> list[grpc.aio.ServerInterceptor]:
    """What a server needs, for its list of interceptors."""
    return [] if _backend is None else [AroundInterceptor(_server_span)]


def client_interceptors() -> list[grpc.aio.ClientInterceptor]:
    """What a channel needs."""
    return [] if _backend is None else [_UnaryCalls(), _Streams()]


@contextmanager
def _server_span(details: Any, context: Any) -> Iterator[None]:
    if _backend is None:
        yield
        return
    metadata = {name: str(value) for name, value in details.invocation_metadata or ()}
    with _backend.server_span(details.method.lstrip("/"), metadata) as attribute:
        try:
            yield
        finally:
            attribute("rpc.grpc.status", status_name(context))


def _with_context(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for name, value in (_backend.context() if _backend else {}).items():
        metadata.add(name, value)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryCalls(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_context(details), request)


class _Streams(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_context(details), request)
