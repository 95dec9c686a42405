"""The sign of life of a worker: registers at the coordinator and renews its lease, for ever.

Two states: *registered* (the last heartbeat was answered; the next one leaves within a third of
the granted lease) and *waiting* (the coordinator is away or cannot answer; tried again within a
second, reported every 30 s). A worker never gives up on a coordinator that is away. It does give
up on one that refuses its heartbeat as wrong: that is a setting to mend, so the error is raised
and ends the service.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import grpc.aio

from rollpacker import wire
from rollpacker.rpc import client, errors
from rollpacker.settings import WorkerSettings
from rollpacker.types import EngineStats
from rollpacker.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

_DEADLINE_SECONDS = 5.0
_LEASE_SHARE = 0.3  # of the lease until the next heartbeat; the contract asks for a third at most
_LONGEST_PAUSE_SECONDS = 10.0
_SHORTEST_PAUSE_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_WAIT_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


async def run_heartbeat(
    settings: WorkerSettings,
    kind: coordinator_service_pb2.WorkerKind.ValueType,
    address: str,
    engine_stats: Callable[[], EngineStats] | None = None,
    reward_slot_count: int = 0,
) -> None:
    """Send heartbeats until cancelled.

    `address` is where this worker's service listens; `settings.advertise_address` replaces it
    where it is set. `engine_stats` is asked before each heartbeat (rollout replicas only).
    `reward_slot_count`: responses that a reward service grades at once.
    Raises InvalidArgumentError or PermissionDeniedError when the coordinator refuses the worker.
    """

    def heartbeat() -> coordinator_service_pb2.HeartbeatRequest:
        return coordinator_service_pb2.HeartbeatRequest(
            worker_id=settings.worker_id,
            address=settings.advertise_address or address,
            kind=kind,
            engine_stats=wire.engine_stats_to_proto(engine_stats()) if engine_stats else None,
            reward_slot_count=reward_slot_count,
        )

    async with client.open_channel(settings.coordinator_address) as channel:
        await _beat(channel, heartbeat, settings.coordinator_address)


async def _beat(
    channel: grpc.aio.Channel,
    heartbeat: Callable[[], coordinator_service_pb2.HeartbeatRequest],
    coordinator: str,
) -> None:
    stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
    waiting = _Waiting(coordinator)
    while True:
        try:
            response = await client.call(
                lambda: stub.Heartbeat(heartbeat(), timeout=_DEADLINE_SECONDS)
            )
        except (errors.InvalidArgumentError, errors.PermissionDeniedError):
            raise
        except errors.ServiceError as error:
            waiting.failed(error)
            await asyncio.sleep(_RETRY_SECONDS * random.uniform(0.5, 1.0))
            continue
        waiting.answered()
        lease_seconds = response.lease_duration.ToNanoseconds() / 1e9
        pause = min(lease_seconds * _LEASE_SHARE, _LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(max(pause, _SHORTEST_PAUSE_SECONDS))


class _Waiting:
    """Says in the log when contact is made, lost, and every 30 s in between."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._registered = False
        self._since = self._last_log = time.monotonic()

    def answered(self) -> None:
        if not self._registered:
            _log.info("registered at the coordinator %s", self._coordinator)
        self._registered = True

    def failed(self, error: errors.ServiceError) -> None:
        now = time.monotonic()
        if self._registered:
            self._registered = False
            self._since = self._last_log = now
            _log.warning("lost the coordinator %s: %s", self._coordinator, error)
        elif now - self._last_log >= _WAIT_LOG_SECONDS:
            self._last_log = now
            _log.warning(
                "waiting for the coordinator %s since %.0f s: %s",
                self._coordinator,
                now - self._since,
                error,
            )
