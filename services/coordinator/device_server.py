"""The RPCs about devices: check, translate, and leave the rest to the leases in Redis.

They need no lease of the coordinator: each change is one comparison and one write, so a standby may
answer as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from redis.exceptions import RedisError

from rollpacker import wire
from rollpacker.devices.lease import (
    DevicesBusyError,
    Grant,
    MemoryNotFreedError,
    StaleLeaseError,
)
from rollpacker.devices.store import DeviceLeases
from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_RETRY_SECONDS = 0.5
_MOST_DEVICES = 1024
Result = TypeVar("Result")


class DeviceServicer(pb_grpc.CoordinatorServiceServicer):
    """A part of the coordinator's service."""

    _devices: DeviceLeases

    async def ClaimDevices(
        self, request: pb.ClaimDevicesRequest, _context: _Context
    ) -> pb.ClaimDevicesResponse:
        if not request.worker_id:
            raise InvalidArgumentError.field("worker_id", "is empty; say who claims")
        if not 1 <= request.count <= _MOST_DEVICES:
            raise InvalidArgumentError.field(
                "count", f"{request.count} is outside 1 to {_MOST_DEVICES}"
            )
        _check_bytes("needed_bytes", request.needed_bytes)
        free = _free_bytes(request.memory)
        try:
            grant = await _reached(
                self._devices.claim(
                    request.worker_id,
                    request.count,
                    request.needed_bytes,
                    free,
                    as_guest=request.as_guest,
                )
            )
        except DevicesBusyError as error:
            raise ResourceExhaustedError(
                "DEVICES_BUSY", str(error), retry_after_seconds=_RETRY_SECONDS
            ) from error
        message = pb.DeviceGrant(
            worker_id=grant.owner, fence=grant.fence, devices=list(grant.devices)
        )
        return pb.ClaimDevicesResponse(grant=message, lease_duration=self._duration())

    async def RenewDevices(
        self, request: pb.RenewDevicesRequest, _context: _Context
    ) -> pb.RenewDevicesResponse:
        try:
            await _reached(self._devices.renew(_grant(request.grant)))
        except StaleLeaseError as error:
            raise FailedPreconditionError("STALE_LEASE", str(error)) from error
        return pb.RenewDevicesResponse(lease_duration=self._duration())

    async def ReleaseDevices(
        self, request: pb.ReleaseDevicesRequest, _context: _Context
    ) -> pb.ReleaseDevicesResponse:
        grant, free = _grant(request.grant), _free_bytes(request.memory)
        _check_bytes("kept_bytes", request.kept_bytes)
        if missing := set(grant.devices) - free.keys():
            raise InvalidArgumentError.field(
                "memory", f"says nothing of {', '.join(sorted(missing))}; measure each device"
            )
        try:
            await _reached(self._devices.release(grant, free, request.kept_bytes))
        except StaleLeaseError as error:
            raise FailedPreconditionError("STALE_LEASE", str(error)) from error
        except MemoryNotFreedError as error:
            raise FailedPreconditionError("MEMORY_NOT_FREED", str(error)) from error
        return pb.ReleaseDevicesResponse()

    async def ListDevices(
        self, _request: pb.ListDevicesRequest, _context: _Context
    ) -> pb.ListDevicesResponse:
        state = await _reached(self._devices.load())
        return pb.ListDevicesResponse(
            leases=[
                pb.DeviceLease(
                    device=device,
                    worker_id=lease.owner,
                    fence=lease.fence,
                    expire_time=wire.timestamp_to_proto(lease.expires),
                    free_bytes=lease.free_bytes,
                    is_guest=table is state.guests,
                )
                for table in (state.leases, state.guests)
                for device, lease in sorted(table.items())
            ]
        )

    def _duration(self) -> Duration:
        duration = Duration()
        duration.FromMilliseconds(round(self._devices.seconds * 1000))
        return duration


async def _reached(work: Awaitable[Result]) -> Result:
    """Raises UnavailableError where Redis is away."""
    try:
        return await work
    except RedisError as error:
        raise UnavailableError("REDIS_AWAY", f"Redis does not answer: {error}") from error


def _grant(message: pb.DeviceGrant) -> Grant:
    if not message.devices:
        raise InvalidArgumentError.field("grant.devices", "is empty; send a grant as it was given")
    return Grant(message.worker_id, message.fence, tuple(message.devices))


def _free_bytes(memory: Sequence[pb.DeviceMemory]) -> dict[str, int]:
    if len(memory) > _MOST_DEVICES:
        raise InvalidArgumentError.field("memory", f"is of more than {_MOST_DEVICES} devices")
    for each in memory:
        if not each.device:
            raise InvalidArgumentError.field("memory.device", "is empty; name each device")
        _check_bytes("memory.free_bytes", each.free_bytes)
    return {each.device: each.free_bytes for each in memory}


def _check_bytes(name: str, value: int) -> None:
    if value < 0:
        raise InvalidArgumentError.field(name, f"{value} is below 0; give bytes")
