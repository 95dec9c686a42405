"""The turn of this coordinator: it waits for the lease, holds it, and gives it back.

Losing the lease ends the process: another coordinator is at work, and every later write of this one
would be refused.
"""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis

from rollpacker.rpc.errors import UnavailableError
from rollpacker.rpc.waiting import told_while_waiting
from rollpacker.store.lease import CoordinatorLease
from services.coordinator.settings import CoordinatorSettings

_STANDBY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """Another coordinator has taken over."""


class Leadership:
    """See the top of the file."""

    def __init__(self, redis: Redis, settings: CoordinatorSettings) -> None:
        self._id = settings.coordinator_id
        self._seconds = settings.coordinator_lease_seconds
        self.lease = CoordinatorLease(redis, self._id, self._seconds)
        self._fence: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this coordinator is the one that drives."""
        return self._fence is not None

    def fence(self) -> int:
        """Of the lease. Raises UnavailableError (STANDBY)."""
        if self._fence is None:
            raise UnavailableError(
                "STANDBY", "this coordinator stands by: another one holds the lease"
            )
        return self._fence

    async def take(self) -> None:
        """Wait until it is this coordinator's turn."""
        async with told_while_waiting("the lease, which another coordinator holds"):
            while True:
                self._fence = await self.lease.acquire()
                if self._fence is not None:
                    break
                await asyncio.sleep(_STANDBY_SECONDS)
        _log.info("coordinating with fence %d", self._fence)

    async def hold(self) -> None:
        """Renew the lease until cancelled. Raises LeaseLostError."""
        while True:
            if not await self.lease.renew(self.fence()):
                raise LeaseLostError(
                    f"coordinator {self._id} has lost its lease: another one has taken over"
                )
            await asyncio.sleep(self._seconds / 3)

    async def release(self) -> None:
        """Let the next coordinator start at once."""
        await self.lease.release(self.fence())
