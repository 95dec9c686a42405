"""Engines let go of devices that the trainer needs; in colocated placement they rest meanwhile.

    round: engines hold the devices --rest begins: released, memory freed--> trainer claims them
      ^                                                                          |
      +----- ApplyEngineSpec of the next round: engines claim them again <--- it gives them back

Who holds a device is decided by its lease alone: a call of the trainer waits for devices that an
engine has still, and an engine for those of the trainer. What is done here is to ask every engine
to let go, and to ask again those that come, or come back, meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollpacker import wire
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import ServiceError
from rollpacker.tasks import end_tasks
from rollpacker.types import EngineSpec
from rollpacker.v1 import coordinator_service_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from services.coordinator.workers import Worker, WorkerRegistry

_RELEASE_SECONDS = 60.0
_POLL_SECONDS = 0.5
_log = logging.getLogger(__name__)


class EngineRest:
    """Of the engines of one run."""

    def __init__(self, workers: WorkerRegistry, run_id: str, fence: int) -> None:
        self._workers = workers
        spec = EngineSpec(run_id, weight_version=0, weights_uri="", resident=False)
        self._request = rollout_service_pb2.ApplyEngineSpecRequest(
            spec=wire.engine_spec_to_proto(spec), fence=fence
        )

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Inside, engines have let go of their devices; those that could not be asked are asked
        again."""
        asked: dict[str, Worker] = {}
        await self._ask(asked)
        watching = asyncio.create_task(self._watch(asked))
        try:
            yield
        finally:
            await end_tasks(watching)

    async def let_go(self) -> None:
        """Have the engines let go of their devices once; a round that needs them claims again."""
        await self._ask({})

    async def _watch(self, asked: dict[str, Worker]) -> None:
        while True:
            await self._workers.wait_for_change(_POLL_SECONDS)
            await self._ask(asked)

    async def _ask(self, asked: dict[str, Worker]) -> None:
        engines = self._workers.alive(coordinator_service_pb2.WORKER_KIND_ROLLOUT)
        new = [worker for worker in engines if asked.get(worker.worker_id) is not worker]
        for worker, has_let_go in zip(
            new, await asyncio.gather(*map(self._let_go, new)), strict=True
        ):
            if has_let_go:
                asked[worker.worker_id] = worker

    async def _let_go(self, worker: Worker) -> bool:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(worker.channel)
        try:
            await call(lambda: stub.ApplyEngineSpec(self._request, timeout=_RELEASE_SECONDS))
        except ServiceError as error:
            _log.warning("engine %s does not let go: %s", worker.worker_id, error)
            return False
        return True
