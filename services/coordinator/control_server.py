"""The RPCs that change a run which is there: check, translate, delegate."""

from __future__ import annotations

from typing import Any

import grpc.aio

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.struct_values import read_struct
from rollpacker.store.records import RunState
from rollpacker.types import DrawId
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from services.coordinator import messages
from services.coordinator.operations import RunOperations
from services.coordinator.runs import Runs

_Context = grpc.aio.ServicerContext[Any, Any]
_STOP_MODES = {
    pb.STOP_MODE_UNSPECIFIED: "after_step",
    pb.STOP_MODE_AFTER_STEP: "after_step",
    pb.STOP_MODE_DRAIN: "drain",
    pb.STOP_MODE_IMMEDIATELY: "immediately",
}
_PAUSE_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: "after_step",
    pb.PAUSE_MODE_AFTER_STEP: "after_step",
    pb.PAUSE_MODE_IMMEDIATELY: "immediately",
}


class ControlServicer(pb_grpc.CoordinatorServiceServicer):
    """A part of the coordinator's service."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._operations = RunOperations(runs)

    async def StopRun(self, request: pb.StopRunRequest, _context: _Context) -> pb.StopRunResponse:
        if request.mode not in _STOP_MODES:
            raise InvalidArgumentError.field("mode", f"{request.mode} is unknown")
        state = await self._operations.stop(request.run_id, _STOP_MODES[request.mode])
        return pb.StopRunResponse(run=await self._run(state))

    async def PauseRun(
        self, request: pb.PauseRunRequest, _context: _Context
    ) -> pb.PauseRunResponse:
        if request.mode not in _PAUSE_MODES:
            raise InvalidArgumentError.field("mode", f"{request.mode} is unknown")
        state = await self._operations.pause(request.run_id, _PAUSE_MODES[request.mode])
        return pb.PauseRunResponse(run=await self._run(state))

    async def ResumeRun(
        self, request: pb.ResumeRunRequest, _context: _Context
    ) -> pb.ResumeRunResponse:
        state = await self._operations.resume(request.run_id, request.until_step)
        return pb.ResumeRunResponse(run=await self._run(state))

    async def UpdateRun(
        self, request: pb.UpdateRunRequest, _context: _Context
    ) -> pb.UpdateRunResponse:
        values = read_struct("settings", request.settings)
        state = await self._operations.update(request.run_id, values)
        return pb.UpdateRunResponse(run=await self._run(state))

    async def ForceLongRound(
        self, request: pb.ForceLongRoundRequest, _context: _Context
    ) -> pb.ForceLongRoundResponse:
        state = await self._operations.force_long_round(request.run_id)
        return pb.ForceLongRoundResponse(run=await self._run(state))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, _context: _Context
    ) -> pb.SaveCheckpointResponse:
        version = await self._operations.save_checkpoint(request.run_id)
        return pb.SaveCheckpointResponse(weight_version=version)

    async def AddPrompts(
        self, request: pb.AddPromptsRequest, _context: _Context
    ) -> pb.AddPromptsResponse:
        rows = [read_struct(f"rows[{i}]", row) for i, row in enumerate(request.rows)]
        added, known = await self._operations.add_prompts(request.run_id, rows)
        return pb.AddPromptsResponse(added_count=added, known_count=known)

    async def RequeueDraws(
        self, request: pb.RequeueDrawsRequest, _context: _Context
    ) -> pb.RequeueDrawsResponse:
        draws = [DrawId(draw.epoch, draw.prompt_id) for draw in request.draws]
        state = await self._operations.requeue(request.run_id, draws, request.level)
        return pb.RequeueDrawsResponse(run=await self._run(state))

    async def DropDraws(
        self, request: pb.DropDrawsRequest, _context: _Context
    ) -> pb.DropDrawsResponse:
        draws = [DrawId(draw.epoch, draw.prompt_id) for draw in request.draws]
        state = await self._operations.drop(request.run_id, draws, request.reason)
        return pb.DropDrawsResponse(run=await self._run(state))

    async def _run(self, state: RunState) -> pb.Run:
        changes, added = await self._runs.store(state.run_id).log_lengths()
        waits = state.status == "queued"
        return messages.run_message(
            state,
            str(self._runs.directory(state.run_id)),
            queue_position=await self._runs.queue_position(state.run_id) if waits else 0,
            change_count=changes,
            added_prompt_count=added,
        )
