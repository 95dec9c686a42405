"""A fake coordinator: the contract of CoordinatorService over a few runs in memory, no training.

It is a real gRPC server of its own process, so that it can be killed. It knows two runs from the
start: `finished` (250 steps, two of them sampled) and `failed`. A run that is started commits
three steps when it is watched, and then succeeds; one that is to pause at a step waits there, and
its watchers with it. Started as `fake_coordinator.py ADDRESS`; with
`--die-once FILE` it exits in the middle of the first watched run, and leaves FILE behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from rollpacker import wire
from rollpacker.rpc import errors
from rollpacker.rpc.server import RpcServer, serve
from rollpacker.settings import SettingsError, parse_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from rollpacker.v1 import types_pb2

LEASE_SECONDS = 0.3
PAGE = 100
START = 1_700_000_000.0  # seconds since the Unix epoch


def step(number: int) -> pb.Step:
    """A committed step: every fifth one is long."""
    long = number % 5 == 4
    return pb.Step(
        step=number,
        round_kind=types_pb2.ROUND_KIND_LONG if long else types_pb2.ROUND_KIND_SHORT,
        level=2 if long else 0,
        start_time=wire.timestamp_to_proto(START + 10 * number),
        end_time=wire.timestamp_to_proto(START + 10 * number + 9),
        metrics={
            "reward/mean": number / 250,
            "response_length/mean": 40.0,
            "timing_s/rollout": 5.25,
            "timing_s/step": 9.0,
        },
        weight_version=number + 1,
    )


def _run(run_id: str, state: pb.Run.State.ValueType, steps: int, **fields: Any) -> pb.Run:
    return pb.Run(
        run_id=run_id,
        state=state,
        step=steps,
        weight_version=steps,
        run_directory=f"/runs/{run_id}",
        create_time=wire.timestamp_to_proto(START),
        **fields,
    )


class FakeCoordinator(pb_grpc.CoordinatorServiceServicer):
    """See the module."""

    def __init__(self, die_once: Path | None) -> None:
        self._die_once = die_once
        self._runs = {
            "finished": _run("finished", pb.Run.STATE_SUCCEEDED, 250, planned_steps=250),
            "failed": _run("failed", pb.Run.STATE_FAILED, 1, failure="no worker: start one"),
        }
        self._workers: dict[str, pb.HeartbeatRequest] = {}

    def _find(self, run_id: str) -> pb.Run:
        if run_id not in self._runs:
            raise errors.NotFoundError("RUN_NOT_FOUND", f"there is no run {run_id}")
        return self._runs[run_id]

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.StartRunResponse:
        values = MessageToDict(request.settings)
        try:
            parse_run_settings(values)
        except SettingsError as error:
            raise errors.InvalidArgumentError(
                "INVALID_SETTINGS", "wrong settings", violations=error.problems
            ) from error
        known = self._runs.get(request.run_id)
        if known is None:
            known = _run(request.run_id, pb.Run.STATE_RUNNING, 0, settings=request.settings)
            known.pause_at_step = request.until_step
            self._runs[request.run_id] = known
        elif MessageToDict(known.settings) != values:
            raise errors.AlreadyExistsError(
                "SETTINGS_DIFFER", f"run {request.run_id} has other settings; take another run id"
            )
        return pb.StartRunResponse(run=known)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=self._find(request.run_id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=reversed(self._runs.values()))

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> pb.StopRunResponse:
        run = self._find(request.run_id)
        ends = {pb.STOP_MODE_IMMEDIATELY: pb.Run.STATE_STOPPED}
        run.state = ends.get(request.mode, pb.Run.STATE_STOPPING)
        run.failure = pb.StopMode.Name(request.mode)  # lets a test see what was asked for
        return pb.StopRunResponse(run=run)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        run = self._find(request.run_id)
        run.state = pb.Run.STATE_PAUSED
        run.failure = pb.PauseMode.Name(request.mode)  # as above
        return pb.PauseRunResponse(run=run)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        run = self._find(request.run_id)
        run.state, run.failure = pb.Run.STATE_RUNNING, ""
        run.pause_at_step = request.until_step
        return pb.ResumeRunResponse(run=run)

    async def UpdateRun(self, request: pb.UpdateRunRequest, context: Any) -> pb.UpdateRunResponse:
        run = self._find(request.run_id)
        run.updated_settings.MergeFrom(request.settings)
        return pb.UpdateRunResponse(run=run)

    async def AddPrompts(
        self, request: pb.AddPromptsRequest, context: Any
    ) -> pb.AddPromptsResponse:
        run = self._find(request.run_id)
        for index, row in enumerate(request.rows):
            if "prompt_id" not in row:
                raise errors.InvalidArgumentError.field(f"rows[{index}].prompt_id", "is missing")
        run.added_prompt_count += len(request.rows)
        return pb.AddPromptsResponse(added_count=len(request.rows))

    async def DropDraws(self, request: pb.DropDrawsRequest, context: Any) -> pb.DropDrawsResponse:
        run = self._find(request.run_id)
        run.dropped_draw_count += len(request.draws)
        return pb.DropDrawsResponse(run=run)

    async def ListSteps(self, request: pb.ListStepsRequest, context: Any) -> pb.ListStepsResponse:
        before = int(request.page_token or self._find(request.run_id).step)
        first = max(0, before - min(request.page_size or PAGE, PAGE))
        return pb.ListStepsResponse(
            steps=[step(number) for number in reversed(range(first, before))],
            next_page_token=str(first) if first else "",
        )

    async def ListSamples(
        self, request: pb.ListSamplesRequest, context: Any
    ) -> pb.ListSamplesResponse:
        if request.step > 1:
            raise errors.NotFoundError("STEP_NOT_FOUND", f"step {request.step} has no samples")
        scored = types_pb2.ScoredResponse(
            response=types_pb2.Response(index=3, token_ids=[1, 2], logprobs=[-1.0, -1.0]),
            reward=1.0,
            advantage=0.5,
            verdict=types_pb2.VERDICT_CORRECT,
            text="\x1b[2J= 12\n",
        )
        group = types_pb2.PromptGroup(
            draw=types_pb2.Draw(epoch=1, prompt_id="p7"), responses=[scored]
        )
        return pb.ListSamplesResponse(groups=[group])

    async def RegradeSamples(
        self, request: pb.RegradeSamplesRequest, context: Any
    ) -> AsyncIterator[pb.RegradeSamplesResponse]:
        self._find(request.run_id)
        last = request.last_step if request.HasField("last_step") else 1
        for number in range(request.first_step, last + 1):
            yield pb.RegradeSamplesResponse(
                step=number,
                response_count=8,
                changed_count=1,
                mean_reward=0.5,
                file=f"/runs/{request.run_id}/regraded/{request.regrade_id}/{number}",
            )

    async def ListDeferredDraws(
        self, request: pb.ListDeferredDrawsRequest, context: Any
    ) -> pb.ListDeferredDrawsResponse:
        self._find(request.run_id)
        draw = types_pb2.Draw(epoch=0, prompt_id="p9", seeds=[1, 2], level=2, first_step=243)
        return pb.ListDeferredDrawsResponse(draws=[draw])

    async def WatchRun(
        self, request: pb.WatchRunRequest, context: Any
    ) -> AsyncIterator[pb.WatchRunResponse]:
        run = self._find(request.run_id)
        if run.state in (pb.Run.STATE_FAILED, pb.Run.STATE_STOPPED):
            yield pb.WatchRunResponse(revision="1", run_changed=run)
            return
        if 0 < run.pause_at_step < 3:
            run.state, run.step = pb.Run.STATE_PAUSED, run.pause_at_step
            yield pb.WatchRunResponse(revision="0", run_changed=run)  # as it is now
        for number in range(int(request.after_revision or 0), 3):
            if run.pause_at_step == number > 0:
                await asyncio.Event().wait()
            yield pb.WatchRunResponse(
                round_progress=pb.RoundProgress(
                    step=number,
                    round_kind=types_pb2.ROUND_KIND_SHORT,
                    launched_group_count=4,
                    finished_group_count=1,
                    phase="rollout",
                )
            )
            yield pb.WatchRunResponse(revision=str(number + 1), step_finished=step(number))
            if self._die_once and not self._die_once.exists() and number == 1:
                self._die_once.touch()
                await asyncio.sleep(0.1)  # let the event leave
                os._exit(9)
        if run.state == pb.Run.STATE_RUNNING:
            run.state, run.step = pb.Run.STATE_SUCCEEDED, 3
        yield pb.WatchRunResponse(revision="4", run_changed=run)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        if request.kind == pb.WORKER_KIND_UNSPECIFIED:
            raise errors.InvalidArgumentError.field("kind", "is not set")
        self._workers[request.worker_id] = request
        response = pb.HeartbeatResponse()
        response.lease_duration.FromMilliseconds(round(1000 * LEASE_SECONDS))
        return response

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(
            workers=[
                pb.Worker(
                    worker_id=worker.worker_id,
                    address=worker.address,
                    kind=worker.kind,
                    engine_stats=worker.engine_stats if worker.HasField("engine_stats") else None,
                    lease_expire_time=wire.timestamp_to_proto(START),
                )
                for worker in self._workers.values()
            ]
        )


def server(address: str, die_once: Path | None = None) -> RpcServer:
    """The fake behind the real server."""
    fake = FakeCoordinator(die_once)
    return RpcServer(
        address,
        [pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name],
        lambda to: pb_grpc.add_CoordinatorServiceServicer_to_server(fake, to),
    )


async def main(address: str, flag: str = "", die_once: str = "") -> None:
    await serve(server(address, Path(die_once) if flag == "--die-once" else None))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
