"""Redis may be away for a while (a restart): try again, and say so.

Only the loss of the connection is retried. Everything that the trainer does in Redis may be done
twice: reads, setting a result, acknowledging, deleting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import redis.exceptions

from rollpacker.rpc.errors import UnavailableError

_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
_LOG_SECONDS = 10.0
GIVE_UP_SECONDS = 60.0
_AWAY = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
)
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


async def through_restarts(
    make: Callable[[], Awaitable[Result]], what: str, seconds: float = GIVE_UP_SECONDS
) -> Result:
    """Repeat `make` while Redis is away. Raises UnavailableError (REDIS_AWAY) after `seconds`."""
    start = time.monotonic()
    last_log = -_LOG_SECONDS
    backoff = _FIRST_BACKOFF_SECONDS
    while True:
        try:
            return await make()
        except _AWAY as error:
            waited = time.monotonic() - start
            if waited + backoff > seconds:
                raise UnavailableError(
                    "REDIS_AWAY", f"{what}: Redis has been away for {waited:.0f} s: {error}"
                ) from error
            if waited - last_log >= _LOG_SECONDS:
                last_log = waited
                _log.warning("%s: Redis is away since %.0f s: %s", what, waited, error)
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)
