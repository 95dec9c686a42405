"""A server interceptor that puts something around every call, whatever the kind of its handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
import grpc.aio

Enter = Callable[[Any, Any], AbstractContextManager[None]]  # of (call details, servicer context)


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """Runs each handler inside `enter(details, context)`. A stream is inside while it is open.

    Methods that the server does not have pass by.
    """

    def __init__(self, enter: Enter) -> None:
        self._enter = enter

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        for kind, wrap in _KINDS.items():
            if behaviour := getattr(handler, kind):
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                call = wrap(behaviour, self._enter, details)
                return make(call, handler.request_deserializer, handler.response_serializer)
        return handler


def _single(behaviour: Any, enter: Enter, details: Any) -> Any:
    async def call(request: Any, context: Any) -> Any:
        with enter(details, context):
            return await behaviour(request, context)

    return call


def _stream(behaviour: Any, enter: Enter, details: Any) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        with enter(details, context):
            async for message in behaviour(request, context):
                yield message

    return call


_KINDS = {
    "unary_unary": _single,
    "stream_unary": _single,
    "unary_stream": _stream,
    "stream_stream": _stream,
}


def status_name(context: Any) -> str:
    """The status that a handler has set; gRPC keeps it as a number or as a member."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((c.name for c in grpc.StatusCode if c.value[0] == (code or 0)), "UNKNOWN")
