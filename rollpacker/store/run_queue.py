"""The runs that wait for their turn, in the order in which they asked.

The status "queued" of a run is the truth; this is its place only, which it gets after the status.
An entry that is left over from a crash does no harm: a run that is not queued is not started. One
that is queued and has no place gets one, at the end, when a coordinator starts.
"""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from rollpacker.store import keys


class RunQueue:
    """The queue of one coordinator's Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, run_id: str) -> None:
        """At the end. Repeat: it keeps its place."""
        await self._redis.zadd(keys.QUEUE, {run_id: time.time()}, nx=True)

    async def remove(self, run_id: str) -> None:
        """Repeat: no effect."""
        await self._redis.zrem(keys.QUEUE, run_id)

    async def first(self) -> str | None:
        """Whose turn it is."""
        found: Any = await self._redis.zrange(keys.QUEUE, 0, 0)
        return found[0].decode() if found else None

    async def position(self, run_id: str) -> int:
        """From 1; 0: it is not in the queue."""
        rank: Any = await self._redis.zrank(keys.QUEUE, run_id)
        return 0 if rank is None else rank + 1
