"""The workers that are alive: registered and kept by their heartbeats, never stored.

A worker is alive until its lease ends; a restarted coordinator learns of all workers from their
next heartbeats. Waiters (`wait_for_change`) are woken by every heartbeat that changes the set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from rollpacker.rpc.client import open_channel
from rollpacker.rpc.errors import UnavailableError
from rollpacker.types import EngineStats
from rollpacker.v1 import coordinator_service_pb2 as pb

THE_MODEL = "the model"
_WAIT_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """A worker with a lease."""

    worker_id: str
    address: str
    kind: pb.WorkerKind.ValueType
    engine_stats: EngineStats | None
    lease_end: float  # seconds since the Unix epoch
    channel: grpc.aio.Channel
    calls: set[grpc.aio.Call] = field(default_factory=set)  # under way; for routing, and to end
    has_moved: bool = False  # its service answers elsewhere now
    reward_slot_count: int = 0  # responses that it grades at once; 0: not told


class WorkerRegistry:
    """All workers of this coordinator."""

    def __init__(
        self, lease_seconds: float, wait_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.lease_seconds = lease_seconds
        self.wait_seconds = wait_seconds
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._retired: list[grpc.aio.Channel] = []
        self._changed = asyncio.Event()

    async def heartbeat(
        self,
        worker_id: str,
        address: str,
        kind: pb.WorkerKind.ValueType,
        engine_stats: EngineStats | None,
        reward_slot_count: int = 0,
    ) -> None:
        """Register a worker or renew its lease; a new address replaces the old one."""
        lease_end = self._clock() + self.lease_seconds
        worker = self._workers.get(worker_id)
        if worker is not None and (worker.address, worker.kind) == (address, kind):
            was_alive = self._is_alive(worker)
            worker.engine_stats, worker.lease_end = engine_stats, lease_end
        else:
            if worker is not None:
                self._retired.append(worker.channel)
                worker.has_moved = True
                for under_way in worker.calls:
                    under_way.cancel()
            was_alive = False
            channel = open_channel(address, takes_turns=kind == pb.WORKER_KIND_REWARD)
            worker = Worker(worker_id, address, kind, engine_stats, lease_end, channel)
            self._workers[worker_id] = worker
        worker.reward_slot_count = reward_slot_count
        if not was_alive:
            _log.info("worker %s is at %s", worker_id, address)
            self._changed.set()

    def alive(self, kind: pb.WorkerKind.ValueType | None = None) -> list[Worker]:
        """Workers with a lease, by kind and id."""
        return sorted(self._found(kind), key=lambda worker: (worker.kind, worker.worker_id))

    def shortest_context(self, of_model: int) -> tuple[int, str]:
        """Tokens of the longest sequence that a model (0: not known) and every rollout replica
        take, by what the settings of these allow, and who takes no longer one; 0: nothing is known.

        What a replica holds now may be another model.
        """
        known = [(of_model, THE_MODEL)]
        for worker in self._found(pb.WORKER_KIND_ROLLOUT):
            if (stats := worker.engine_stats) is not None:
                known.append((stats.max_context_tokens, worker.worker_id))
                known.append((stats.kv_budget_tokens, worker.worker_id))
        return min((limit for limit in known if limit[0] > 0), default=(0, ""))

    def reward_slots(self) -> int | None:
        """Responses that all reward services together grade at once; None: one does not tell."""
        counts = [worker.reward_slot_count for worker in self._found(pb.WORKER_KIND_REWARD)]
        return sum(counts) if all(counts) else None

    async def wait_for_change(self, seconds: float) -> None:
        """Return when a worker has come, or after `seconds`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def least_busy(self, kind: pb.WorkerKind.ValueType) -> Worker:
        """The worker of a kind with the fewest calls under way; waits until there is one.

        Raises UnavailableError after the configured wait.
        """
        start = last_log = self._clock()
        while not (found := self._found(kind)):
            waited = self._clock() - start
            name = pb.WorkerKind.Name(kind).removeprefix("WORKER_KIND_").lower()
            if waited > self.wait_seconds:
                raise UnavailableError(
                    "NO_WORKER",
                    f"no {name} worker for {waited:.0f} s; start one, or look at its log",
                )
            if self._clock() - last_log >= _WAIT_LOG_SECONDS:
                last_log = self._clock()
                _log.warning("waiting for a %s worker since %.0f s", name, waited)
            await self.wait_for_change(1.0)
        return min(found, key=lambda worker: (len(worker.calls), worker.worker_id))

    async def close(self) -> None:
        """Close every channel."""
        for channel in [*self._retired, *(worker.channel for worker in self._workers.values())]:
            await channel.close()

    def _found(self, kind: pb.WorkerKind.ValueType | None) -> list[Worker]:
        """Workers with a lease, in no order."""
        return [
            worker
            for worker in self._workers.values()
            if self._is_alive(worker) and kind in (None, worker.kind)
        ]

    def _is_alive(self, worker: Worker) -> bool:
        return worker.lease_end > self._clock()
