"""A worker's devices: claimed before it uses them, renewed meanwhile, given back afterwards.

    none --claim: the coordinator grants--> held --release: memory is measured to be free--> none
      |                                      |
      |                                      +--renewal refused: lost; the process must end
      +--bound to devices that another keeps, while others are free: lost too

Losing a lease means that another worker has the devices, and only the end of this process frees its
memory for certain; so `keep` raises, the service ends, and started again it claims anew. A process
that has computed on a device stays bound to it: from its first grant on it claims the same ones.
Should a worker that was started anew have taken one of them meanwhile, a new process is bound to
nothing and can have one that is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from rollpacker import wire
from rollpacker.devices.memory import Memory, Meter, MeterError
from rollpacker.devices.settings import DeviceWorkerSettings
from rollpacker.rpc.client import call, open_channel
from rollpacker.rpc.errors import FailedPreconditionError, ServiceError, UnavailableError
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc

_DEADLINE_SECONDS = 10.0
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 20.0  # of a claim; whoever wants it more asks again
_RELEASE_SECONDS = 30.0  # a driver takes its time to free what a process had
_LEAVE_SECONDS = 3.0  # for a process that ends
_SHARE = 0.3  # of the lease until the next renewal
_log = logging.getLogger(__name__)


class DeviceLeaseLostError(Exception):
    """Another worker has the devices of this one."""


class Devices(Protocol):
    """The devices of a worker."""

    async def claim(self, count: int) -> tuple[str, ...]:
        """Hold `count` devices; those that are held already, if they are so many.

        Raises UnavailableError (DEVICES_BUSY, or the coordinator is away) after a while.
        """
        ...

    async def release(self) -> int:
        """Give them back, after their memory was freed; returns the free bytes of the fullest one,
        0 when none is held. Raises UnavailableError (DEVICES_HELD): it did not work out; they are
        held still."""
        ...

    async def keep(self) -> None:
        """For ever: renew. Raises DeviceLeaseLostError."""
        ...

    async def leave(self) -> None:
        """Give them back if that works out soon; for a process that ends, whose lease would lapse
        otherwise."""
        ...

    @property
    def held(self) -> tuple[str, ...]:
        """Those that are held now."""
        ...


class NoDevices:
    """Of a worker that claims none: it computes on a CPU, or on GPUs of its own."""

    held: tuple[str, ...] = ()

    async def claim(self, count: int) -> tuple[str, ...]:  # noqa: ARG002
        """See Devices."""
        return ()

    async def release(self) -> int:
        """See Devices."""
        return 0

    async def keep(self) -> None:
        """See Devices."""
        await asyncio.Event().wait()

    async def leave(self) -> None:
        """See Devices."""


class LeasedDevices:
    """Devices that the coordinator lends; create it inside the event loop that uses it."""

    def __init__(
        self,
        coordinator_address: str,
        worker_id: str,
        meter: Meter,
        share: float,
        *,
        bound: bool,
        guest_bytes: int = 0,
    ) -> None:
        """`share` of a device's memory must be free at a claim and at a release. `bound`: the
        process itself computes there, not a child that it may start on others. `guest_bytes`: all
        that it uses of a device, beside whoever holds it; 0: it is the holder."""
        self._guest_bytes = guest_bytes
        self._worker_id = worker_id
        self._meter = meter
        self._share = share
        self._bound_to: tuple[str, ...] | None = None
        self._is_bound = bound
        self._grant: pb.DeviceGrant | None = None
        self._refused: tuple[float, float] | None = None  # first and last refusal, monotonic
        self._lost = ""  # why this process cannot have its devices again
        self._lease_seconds = 0.0
        self._changing = asyncio.Lock()
        self._renew_now = asyncio.Event()
        self._channel = open_channel(coordinator_address)
        self._stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(self._channel)

    @property
    def held(self) -> tuple[str, ...]:
        """See Devices."""
        return tuple(self._grant.devices) if self._grant is not None else ()

    async def claim(self, count: int) -> tuple[str, ...]:
        """See Devices."""
        async with self._changing:
            end = time.monotonic() + _PATIENCE_SECONDS
            while len(self.held) != count:
                try:
                    await self._claim(count)
                except (ServiceError, MeterError) as error:
                    await self._look_elsewhere(count)
                    if self._lost or time.monotonic() >= end:
                        raise UnavailableError(
                            "DEVICES_BUSY", f"no devices for {self._worker_id}: {error}"
                        ) from error
                    await asyncio.sleep(_POLL_SECONDS)
            return self.held

    async def release(self) -> int:
        """See Devices."""
        async with self._changing:
            end = time.monotonic() + _RELEASE_SECONDS
            while self._grant is not None:
                try:
                    return await self._release(self._grant)
                except (ServiceError, MeterError) as error:
                    if time.monotonic() >= end:
                        raise UnavailableError(
                            "DEVICES_HELD",
                            f"{self._worker_id} cannot give back its devices: {error}",
                        ) from error
                    await asyncio.sleep(_POLL_SECONDS)
            return 0

    async def keep(self) -> None:
        """See Devices."""
        while True:
            grant = self._grant
            try:
                async with asyncio.timeout(self._lease_seconds * _SHARE or None):
                    await self._renew_now.wait()
            except TimeoutError:
                pass
            self._renew_now.clear()
            if self._lost:
                raise DeviceLeaseLostError(self._lost)
            if grant is not None and grant is self._grant:
                await self._renew(grant)

    async def leave(self) -> None:
        """See Devices."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self.release()
        except (TimeoutError, UnavailableError) as error:
            _log.warning("devices are not given back, their lease will end: %s", error)
        await self._channel.close()

    async def _look_elsewhere(self, count: int) -> None:
        """End this process if it waits in vain for the devices that it is bound to, and others are
        free: after two leases, in which a dead holder's would have ended."""
        at = time.monotonic()
        first, last = self._refused or (at, at)
        if at - last > self._lease_seconds:  # nobody asked in between
            first = at
        self._refused = first, at
        if self._bound_to is None or at - first < 2 * self._lease_seconds:
            return
        try:
            memory = await self._measured(None)
            request = pb.ListDevicesRequest()
            answer = await call(lambda: self._stub.ListDevices(request, timeout=_DEADLINE_SECONDS))
        except (ServiceError, MeterError):
            return
        now = time.time()
        held = {
            lease.device
            for lease in answer.leases
            if not lease.is_guest and wire.timestamp_from_proto(lease.expire_time) > now
        }
        free = [d for d, m in memory.items() if d not in held and m.free >= self._share * m.total]
        if len(free) >= count:
            self._lost = (
                f"{', '.join(self._bound_to)}, where this process is bound to, is kept by another,"
                f" and {', '.join(free)} is free: it has to start anew"
            )
            self._renew_now.set()

    async def _claim(self, count: int) -> None:
        memory = await self._measured(self._bound_to)
        shares = {device: round(self._share * m.total) for device, m in memory.items()}
        share = min(shares.values(), default=0)
        if not self._guest_bytes:  # of a larger device a larger part must be free
            memory = {d: m for d, m in memory.items() if not share <= m.free < shares[d]}
        request = pb.ClaimDevicesRequest(
            worker_id=self._worker_id,
            count=count,
            needed_bytes=self._guest_bytes or share,
            memory=_messages(memory),
            as_guest=self._guest_bytes > 0,
        )
        answer = await call(lambda: self._stub.ClaimDevices(request, timeout=_DEADLINE_SECONDS))
        devices = tuple(answer.grant.devices)
        if self._is_bound:
            self._bound_to = devices
        self._meter.keep_to(devices)
        self._grant, self._refused = answer.grant, None
        self._lease_seconds = answer.lease_duration.ToNanoseconds() / 1e9
        self._renew_now.set()
        _log.info("holding %s, fence %d", ", ".join(devices), answer.grant.fence)

    async def _release(self, grant: pb.DeviceGrant) -> int:
        memory = await self._measured(grant.devices)
        kept = max(round((1 - self._share) * m.total) for m in memory.values())
        request = pb.ReleaseDevicesRequest(grant=grant, memory=_messages(memory), kept_bytes=kept)
        try:
            await call(lambda: self._stub.ReleaseDevices(request, timeout=_DEADLINE_SECONDS))
        except FailedPreconditionError as error:
            if error.reason != "STALE_LEASE":  # else they are another's already
                raise
        self._grant = None
        free = min(m.free for m in memory.values())
        _log.info("gave back %s with %d bytes free", ", ".join(grant.devices), free)
        return free

    async def _renew(self, grant: pb.DeviceGrant) -> None:
        request = pb.RenewDevicesRequest(grant=grant)
        try:
            await call(lambda: self._stub.RenewDevices(request, timeout=_DEADLINE_SECONDS))
        except FailedPreconditionError as error:
            if grant is self._grant and not self._changing.locked():
                raise DeviceLeaseLostError(f"the lease is lost: {error.message}") from error
        except ServiceError as error:
            _log.warning("the lease of the devices is not renewed: %s", error)

    async def _measured(self, devices: Iterable[str] | None) -> Mapping[str, Memory]:
        """Of the named devices; None: all that may be claimed. Raises MeterError."""
        found = await asyncio.to_thread(self._meter.memory)
        if devices is None:
            return found
        try:
            return {name: found[name] for name in devices}
        except KeyError as error:
            raise MeterError(f"{error} cannot be measured") from error


def worker_devices(
    settings: DeviceWorkerSettings, meter: Meter | None, *, bound: bool, guest_bytes: int = 0
) -> Devices:
    """The devices of a worker; see LeasedDevices. Without a meter it claims none."""
    if meter is None:
        return NoDevices()
    return LeasedDevices(
        settings.coordinator_address,
        settings.worker_id,
        meter,
        settings.device_share,
        bound=bound,
        guest_bytes=guest_bytes,
    )


def _messages(memory: Mapping[str, Memory]) -> list[pb.DeviceMemory]:
    return [pb.DeviceMemory(device=name, free_bytes=m.free) for name, m in memory.items()]
