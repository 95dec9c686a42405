"""Channels and calls: every call has a deadline, and only UNAVAILABLE is ever retried."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from rollpacker.observability.tracing import client_interceptors
from rollpacker.rpc import errors
from rollpacker.rpc.security import SERVER_NAME, Security
from rollpacker.rpc.server import MAX_MESSAGE_BYTES
from rollpacker.rpc.waiting import told_while_waiting

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)
_IN_TURN = ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def open_channel(
    address: str, security: Security | None = None, *, takes_turns: bool = False
) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:///path"; connects when first used, and again after.

    `takes_turns`: a name with several addresses stands for replicas, and calls go to each in turn.
    With TLS and token of `security`, or where the environment gives them
    (`rollpacker.rpc.security`). Raises InvalidArgumentError when it gives half of them.
    """
    security = security or Security.from_environment()
    options = (*_OPTIONS, _IN_TURN) if takes_turns else _OPTIONS
    if not security.uses_tls:
        return grpc.aio.insecure_channel(
            address, options=options, interceptors=client_interceptors()
        )
    options = (*options, ("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.aio.secure_channel(
        address,
        security.channel_credentials(),
        options=options,
        interceptors=client_interceptors(),
    )


async def call(make: Callable[[], Awaitable[Result]]) -> Result:
    """One unary call (`lambda: stub.Method(request, timeout=...)`); raises ServiceError."""
    try:
        return await make()
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc_error(error) from error


async def stream(make: Callable[[], AsyncIterable[Result]]) -> AsyncGenerator[Result, None]:
    """The messages of one streaming call; raises ServiceError. Closing it cancels the call."""
    messages = make()
    try:
        async for message in messages:
            yield message
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc_error(error) from error
    finally:
        if isinstance(messages, grpc.aio.Call):
            messages.cancel()


async def call_until(make: Callable[[], Awaitable[Result]], *, seconds: float, what: str) -> Result:
    """Repeat an idempotent unary call while it is UNAVAILABLE, for up to `seconds` in all.

    Logs every 30 s what it waits for, also while a call is under way. Raises the last
    UnavailableError at the end, and any other ServiceError at once.
    """
    start = time.monotonic()
    backoff, is_first = _FIRST_BACKOFF_SECONDS, True
    async with told_while_waiting(what):
        while True:
            try:
                return await call(make)
            except errors.UnavailableError as error:
                if time.monotonic() - start + backoff > seconds:
                    raise
                if is_first:
                    is_first = False
                    _log.warning("%s is away: %s", what, error)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)
