"""Who coordinates: one holder at a time, each with a higher fencing number than the last.

The holder writes "{coordinator_id}#{fence}" with a time to live and renews it. A coordinator that
comes back under its own id takes its lease over at once; another one waits until it expires. A
holder that was late takes it again, if nobody else has had it: the counter still has its fence. The
fence goes with every call and commit, so a holder that was paused past its lease changes nothing.
"""

from __future__ import annotations

from redis.asyncio import Redis

from rollpacker.store import keys

_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and string.match(holder, '^(.*)#') ~= ARGV[1] then return 0 end
local fence = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1] .. '#' .. fence, 'PX', ARGV[2])
return fence
"""
_RENEW = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if not holder and redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class CoordinatorLease:
    """The right to coordinate."""

    def __init__(self, redis: Redis, coordinator_id: str, seconds: float) -> None:
        self._redis = redis
        self._id = coordinator_id
        self._milliseconds = round(seconds * 1000)

    async def acquire(self) -> int | None:
        """The new fencing number, or None while another coordinator holds the lease."""
        names = (keys.COORDINATOR_LEASE, keys.COORDINATOR_FENCE)
        fence = await self._eval(_ACQUIRE, names, self._id, self._milliseconds)
        return fence or None

    async def renew(self, fence: int) -> bool:
        """Hold on for another term; False when another coordinator has taken over."""
        names = (keys.COORDINATOR_LEASE, keys.COORDINATOR_FENCE)
        holder = f"{self._id}#{fence}"
        return bool(await self._eval(_RENEW, names, holder, fence, self._milliseconds))

    async def release(self, fence: int) -> None:
        """Let the next coordinator start at once."""
        await self._eval(_RELEASE, (keys.COORDINATOR_LEASE,), f"{self._id}#{fence}")

    async def _eval(self, script: str, names: tuple[str, ...], *values: object) -> int:
        arguments = [*names, *map(str, values)]
        return int(await self._redis.eval(script, len(names), *arguments))
