"""A Redis connection that outlives a restart of the server."""

from __future__ import annotations

from redis.asyncio import Redis
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
    return Redis.from_url(
        url,
        retry=Retry(ExponentialBackoff(cap=_CAP_SECONDS, base=0.02), retries=_RETRIES),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
        socket_connect_timeout=5,
        socket_timeout=30,
        health_check_interval=15,
    )
