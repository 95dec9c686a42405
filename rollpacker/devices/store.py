"""The leases in Redis: one key, changed by comparing and setting.

Each change reads the state, asks `lease` what it becomes, and writes it if nobody else did
meanwhile; else it starts again. The clock is Redis', so processes need not agree on the time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import WatchError

from rollpacker.devices import lease
from rollpacker.devices.lease import Claim, Grant, Lease, Leases
from rollpacker.store import keys

Result = TypeVar("Result")


class DeviceLeases:
    """Claims, renewals and releases. All raise redis errors."""

    def __init__(self, redis: Redis, seconds: float) -> None:
        """`seconds`: a lease that is not renewed lapses after it."""
        self._redis = redis
        self.seconds = seconds

    async def claim(
        self,
        owner: str,
        count: int,
        needed_bytes: int,
        free_bytes: Mapping[str, int],
        *,
        as_guest: bool = False,
    ) -> Grant:
        """Raises DevicesBusyError."""
        request = Claim(owner, count, needed_bytes, free_bytes, self.seconds, as_guest)
        return await self._change(lambda state, now: lease.claim(state, request, now))

    async def renew(self, grant: Grant) -> None:
        """To be called every third of the lease's time. Raises StaleLeaseError."""
        await self._change(lambda s, now: (lease.renew(s, grant, self.seconds, now), None))

    async def release(
        self, grant: Grant, free_bytes: Mapping[str, int], kept_bytes: int = 0
    ) -> None:
        """`free_bytes`: measured after letting go. Raises StaleLeaseError, MemoryNotFreedError."""
        await self._change(lambda s, _: (lease.release(s, grant, free_bytes, kept_bytes), None))

    async def load(self) -> Leases:
        """Who holds what."""
        return _from_json(await self._redis.get(keys.DEVICES))

    async def _change(self, change: Callable[[Leases, float], tuple[Leases, Result]]) -> Result:
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                await pipe.watch(keys.DEVICES)
                seconds, microseconds = await pipe.time()
                state = _from_json(await pipe.get(keys.DEVICES))
                changed, result = change(state, int(seconds) + int(microseconds) / 1e6)
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.set(keys.DEVICES, json.dumps(dataclasses.asdict(changed)))
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return result


def _from_json(data: Any) -> Leases:
    if data is None:
        return Leases()
    values = json.loads(data)
    leases, guests = (
        {device: Lease(**item) for device, item in values.get(name, {}).items()}
        for name in ("leases", "guests")
    )
    users = {device: tuple(names) for device, names in values.get("users", {}).items()}
    return Leases(values["fence"], leases, guests, users)
