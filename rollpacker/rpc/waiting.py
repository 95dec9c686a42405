"""Saying in the log what is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

WAIT_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def told_while_waiting(what: str) -> AsyncIterator[None]:
    """While the block runs, log every 30 s that `what` is waited for, and since when."""
    start, loop = time.monotonic(), asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []  # the next one alone

    def tell() -> None:
        _log.warning("waiting for %s since %.0f s", what, time.monotonic() - start)
        timers[:] = [loop.call_later(WAIT_LOG_SECONDS, tell)]

    timers.append(loop.call_later(WAIT_LOG_SECONDS, tell))
    try:
        yield
    finally:
        timers[0].cancel()
