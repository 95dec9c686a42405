"""The leases of a host in Redis: one key, changed by comparing and setting.

Each change reads the state, asks `lease` what it becomes, and writes it if nobody else did
meanwhile; else it starts again. The clock is Redis', so processes need not agree on the time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import WatchError

from rollpacker.devices import lease
from rollpacker.devices.lease import Claim, DevicesBusyError, Grant, HostDevices, Lease
from rollpacker.store import keys

Result = TypeVar("Result")
FreeBytes = Callable[[], Mapping[int, int]]  # measures each device that would do
_POLL_SECONDS = 0.2
_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


class DeviceLeases:
    """Claims, renewals and releases on one host. All raise redis errors."""

    def __init__(self, redis: Redis, host: str, seconds: float) -> None:
        """`seconds`: a lease that is not renewed lapses after it."""
        self._redis = redis
        self._key = keys.devices(host)
        self._seconds = seconds

    async def claim(
        self, owner: str, count: int, needed_bytes: int, free_bytes: Mapping[int, int]
    ) -> Grant:
        """Raises DevicesBusyError."""
        request = Claim(owner, count, needed_bytes, free_bytes, self._seconds)
        return await self._change(lambda state, now: lease.claim(state, request, now))

    async def wait_claim(
        self, owner: str, count: int, needed_bytes: int, measure: FreeBytes, patience: float
    ) -> Grant:
        """Claim until it works, measuring anew each time. Raises DevicesBusyError after
        `patience` seconds."""
        end = time.monotonic() + patience
        next_log = time.monotonic() + _LOG_SECONDS
        while True:
            free_bytes = await asyncio.to_thread(measure)
            try:
                return await self.claim(owner, count, needed_bytes, free_bytes)
            except DevicesBusyError as error:
                now = time.monotonic()
                if now >= end:
                    raise
                if now >= next_log:
                    next_log = now + _LOG_SECONDS
                    _log.warning("waiting for devices: %s", error)
            await asyncio.sleep(_POLL_SECONDS)

    async def renew(self, grant: Grant) -> None:
        """To be called every third of the lease's time. Raises StaleLeaseError."""
        await self._change(lambda s, now: (lease.renew(s, grant, self._seconds, now), None))

    async def release(
        self, grant: Grant, free_bytes: Mapping[int, int], kept_bytes: int = 0
    ) -> None:
        """`free_bytes`: measured after letting go. Raises StaleLeaseError, MemoryNotFreedError."""
        await self._change(lambda s, _: (lease.release(s, grant, free_bytes, kept_bytes), None))

    async def load(self) -> HostDevices:
        """Who holds what."""
        return _from_json(await self._redis.get(self._key))

    async def _change(
        self, change: Callable[[HostDevices, float], tuple[HostDevices, Result]]
    ) -> Result:
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                await pipe.watch(self._key)
                seconds, microseconds = await pipe.time()
                state = _from_json(await pipe.get(self._key))
                changed, result = change(state, int(seconds) + int(microseconds) / 1e6)
                pipe.multi()  # type: ignore[no-untyped-call]
                pipe.set(self._key, json.dumps(dataclasses.asdict(changed)))
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return result


def _from_json(data: Any) -> HostDevices:
    if data is None:
        return HostDevices()
    values = json.loads(data)
    leases = {int(device): Lease(**item) for device, item in values["leases"].items()}
    return HostDevices(values["fence"], leases)
