"""T_anchor of each test case: the largest CPU time of a correct run so far, in Redis.

One sorted set per prompt, member = the test case, score = seconds. ZADD GT lets it only grow, so
replicas may write in any order, repeat, and share what they know. Anchors are advice: a lost one
costs a longer time limit until the next correct run, so they expire when a run stops using them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from rollpacker.store import keys

EXPIRY_SECONDS = 30 * 24 * 3600


class RedisTimeoutAnchors:
    """Anchors of every run; raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def get(self, run_id: str, prompt_id: str) -> dict[str, float]:
        """CPU seconds by test case; empty when no run was correct yet."""
        key = keys.timeout_anchors(run_id, prompt_id)
        pairs: Any = await self._redis.zrange(key, 0, -1, withscores=True)
        return {member.decode(): float(score) for member, score in pairs}

    async def raise_to(self, run_id: str, prompt_id: str, seconds: Mapping[str, float]) -> None:
        """Raise anchors to at least these; lower values change nothing. Repeat: no effect."""
        if not seconds:
            return
        key = keys.timeout_anchors(run_id, prompt_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.zadd(key, dict(seconds), gt=True)
            pipeline.expire(key, EXPIRY_SECONDS)
            await pipeline.execute()
