"""Redis clients: one that outlives a restart of the server, and one whose owner decides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError  # noqa: A004

_RETRIES = 120  # about a minute at the cap of the backoff
_CAP_SECONDS = 0.5


def connect(url: str) -> Redis:
    """A client of bytes that repeats a command while the server is away, for about a minute.

    A command whose reply was lost may so be carried out twice: writers must stand that.
    Raises redis.exceptions.ConnectionError in the end.
    """
    return open_client(
        url,
        retry=Retry(ExponentialBackoff(cap=_CAP_SECONDS, base=0.02), retries=_RETRIES),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
        socket_connect_timeout=5,
        socket_timeout=30,
        health_check_interval=15,
    )


def open_client(url: str, **options: Any) -> Redis:
    """A client whose every loss of the connection is a ConnectionError; `options`: of `Redis`."""
    client = Redis.from_url(url, **options)
    pool = client.connection_pool
    pool.connection_class = type("Connection", (_LossIsNoticed, pool.connection_class), {})
    return client


class _LossIsNoticed(AbstractConnection):
    """uvloop refuses to write to a connection that was reset with a RuntimeError, which redis-py
    takes for a bug of the caller instead of the loss of the connection that it is."""

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """As in redis-py. Raises ConnectionError when the connection is lost."""
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise ConnectionError(f"the connection is closed: {error}") from error
