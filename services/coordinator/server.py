"""The RPCs of the coordinator: check, translate, delegate. The contract is in the proto."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from rollpacker import wire
from rollpacker.rpc.errors import InvalidArgumentError, OutOfRangeError
from rollpacker.rpc.struct_values import read_struct
from rollpacker.store.run_store import StoredEvent
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator import messages
from services.coordinator.control_server import ControlServicer
from services.coordinator.device_server import DeviceServicer
from services.coordinator.regrade import regrade_samples
from services.coordinator.runs import Runs
from services.coordinator.samples_page import samples_page
from services.coordinator.workers import WorkerRegistry

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
_Context = grpc.aio.ServicerContext[Any, Any]
_MAX_PAGE = 1000
_DEFAULT_PAGE = 100
_POLL_SECONDS = 0.5
_PAGE_TOKEN = re.compile(r"[0-9]{1,18}")
_REVISION = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_REVISION_PARTS_BELOW = 1 << 64
_ENDED = ("succeeded", "failed", "stopped")


class CoordinatorServicer(ControlServicer, DeviceServicer):
    """See coordinator_service.proto; the calls that change a run are in `control_server`, those
    about devices in `device_server`."""

    def __init__(self, runs: Runs, workers: WorkerRegistry) -> None:
        super().__init__(runs)
        self._workers = workers
        self._devices = runs.devices

    async def StartRun(self, request: pb.StartRunRequest, context: _Context) -> pb.StartRunResponse:
        values = read_struct("settings", request.settings)
        state = await self._runs.start(
            request.run_id,
            values,
            validate_only=request.validate_only,
            queue=request.queue,
            until_step=request.until_step,
        )
        return pb.StartRunResponse(run=await self._run(state))

    async def GetRun(self, request: pb.GetRunRequest, context: _Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._run(await self._runs.get(request.run_id)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: _Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(
            runs=[await self._run(state) for state in await self._runs.list()]
        )

    async def ListSteps(
        self, request: pb.ListStepsRequest, context: _Context
    ) -> pb.ListStepsResponse:
        if not 0 <= request.page_size <= _MAX_PAGE:
            raise InvalidArgumentError.field(
                "page_size", f"{request.page_size} is outside 0 to {_MAX_PAGE}"
            )
        state = await self._runs.get(request.run_id)
        before = _page_start(request.page_token, state.step)
        size = request.page_size or _DEFAULT_PAGE
        records = await self._runs.store(request.run_id).records_before(before, size)
        more = bool(records) and records[-1].step > 0
        return pb.ListStepsResponse(
            steps=[messages.step_message(record) for record in records],
            next_page_token=str(records[-1].step) if more else "",
        )

    async def ListSamples(
        self, request: pb.ListSamplesRequest, context: _Context
    ) -> pb.ListSamplesResponse:
        state = await self._runs.get(request.run_id)
        directory = self._runs.directory(request.run_id)
        return await asyncio.to_thread(samples_page, directory, state.step, request)

    async def ListDeferredDraws(
        self, request: pb.ListDeferredDrawsRequest, context: _Context
    ) -> pb.ListDeferredDrawsResponse:
        state = await self._runs.get(request.run_id)
        queue = sorted(state.deferred, key=lambda item: -item.draw.level)
        return pb.ListDeferredDrawsResponse(
            draws=[wire.draw_to_proto(item.draw) for item in queue],
            dropped=[messages.dropped_message(dropped) for dropped in state.dropped],
        )

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: _Context
    ) -> AsyncIterator[pb.WatchRunResponse]:
        await self._runs.get(request.run_id)
        store = self._runs.store(request.run_id)
        revision = await self._first_revision(request)
        shown = None
        while True:
            state = await self._runs.get(request.run_id)
            events = await store.read_events(revision, _POLL_SECONDS)
            for event in events:
                revision = event.revision
                yield await self._watch_message(request.run_id, event)
            progress = self._runs.progress if self._runs.is_active(request.run_id) else None
            if progress is not None and progress != shown:
                shown = progress
                yield pb.WatchRunResponse(
                    revision=revision,
                    event_time=wire.timestamp_to_proto(time.time()),
                    round_progress=messages.progress_message(progress),
                )
            if not events and state.status in _ENDED:
                return

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: _Context
    ) -> pb.HeartbeatResponse:
        for name in ("worker_id", "address"):
            if not getattr(request, name):
                raise InvalidArgumentError.field(name, "is empty; every worker needs one")
        if request.kind == pb.WORKER_KIND_UNSPECIFIED:
            raise InvalidArgumentError.field("kind", "is unset; say what the worker does")
        stats = None
        if request.HasField("engine_stats"):
            stats = wire.engine_stats_from_proto(request.engine_stats)
        if request.reward_slot_count < 0:
            raise InvalidArgumentError.field(
                "reward_slot_count",
                f"{request.reward_slot_count} is below 0; 0 says that it is not known",
            )
        await self._workers.heartbeat(
            request.worker_id, request.address, request.kind, stats, request.reward_slot_count
        )
        lease = Duration()
        lease.FromMilliseconds(round(self._workers.lease_seconds * 1000))
        return pb.HeartbeatResponse(lease_duration=lease)

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: _Context
    ) -> pb.ListWorkersResponse:
        workers = [messages.worker_message(worker) for worker in self._workers.alive()]
        return pb.ListWorkersResponse(workers=workers)

    async def RegradeSamples(
        self, request: pb.RegradeSamplesRequest, context: _Context
    ) -> AsyncIterator[pb.RegradeSamplesResponse]:
        async for step in regrade_samples(self._runs, self._workers, request):
            yield step

    async def RunEvaluation(
        self, request: pb.RunEvaluationRequest, context: _Context
    ) -> pb.RunEvaluationResponse:
        measured = await self._operations.evaluate(request.run_id)
        return pb.RunEvaluationResponse(
            weight_version=measured.weight_version,
            sets=[
                pb.HeldOutScores(name=name, scores=scores)
                for name, scores in measured.scores.items()
            ],
        )

    async def _first_revision(self, request: pb.WatchRunRequest) -> str:
        if not request.after_revision:
            return "0-0"
        after = _revision_key(request.after_revision)
        oldest = await self._runs.store(request.run_id).oldest_kept_revision()
        if after < _revision_key(oldest):
            raise OutOfRangeError(
                "REVISION_COMPACTED",
                f"events up to {oldest} are gone; watch from after_revision {oldest}",
            )
        newest = await self._runs.store(request.run_id).last_revision()
        if after > _revision_key(newest):
            raise OutOfRangeError(
                "REVISION_UNKNOWN",
                f"{request.after_revision} is after the newest event, {newest}: the run was"
                " started anew since; watch from the start",
            )
        return request.after_revision

    async def _watch_message(self, run_id: str, event: StoredEvent) -> pb.WatchRunResponse:
        message = pb.WatchRunResponse(
            revision=event.revision, event_time=wire.timestamp_to_proto(event.time)
        )
        if event.record is not None:
            message.step_finished.CopyFrom(messages.step_message(event.record))
        elif event.ladder is not None:
            message.ladder_chosen.CopyFrom(messages.ladder_message(event.ladder))
        else:
            message.run_changed.CopyFrom(await self._run(await self._runs.get(run_id)))
        return message


def _page_start(token: str, step: int) -> int:
    if not token:
        return step
    if not _PAGE_TOKEN.fullmatch(token):
        raise InvalidArgumentError.field(
            "page_token", f"{token!r:.80} is not a next_page_token of ListSteps"
        )
    return int(token)


def _revision_key(revision: str) -> tuple[int, int]:
    match = _REVISION.fullmatch(revision)
    if match:
        milliseconds, sequence = int(match[1]), int(match[2])
        if max(milliseconds, sequence) < _REVISION_PARTS_BELOW:
            return milliseconds, sequence
    raise InvalidArgumentError.field(
        "after_revision", f"{revision!r:.80} is not a revision that WatchRun sent"
    )
