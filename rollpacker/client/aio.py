"""The coordinator's calls, one method each, with deadlines; for asyncio code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.struct_pb2 import Struct

from rollpacker.rpc import client, errors
from rollpacker.rpc.security import Security
from rollpacker.settings import RunSettings
from rollpacker.types import DrawId
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from rollpacker.v1 import types_pb2

_LONG_DEADLINE_SECONDS = 600.0  # of calls that read data, or wait for an update
_PAGE = 1000
_RECONNECT_SECONDS = 0.5
_RECONNECT_PATIENCE_SECONDS = 30.0
Result = TypeVar("Result")


class AsyncClient:
    """Calls to one coordinator. All raise rollpacker.rpc.errors.ServiceError.

    Every call may be repeated, so one that meets a coordinator that is away is tried again for up
    to `patience_seconds`. `deadline_seconds` is of one try of a short call.
    """

    def __init__(
        self,
        stub: pb_grpc.CoordinatorServiceAsyncStub,
        patience_seconds: float = 0.0,
        deadline_seconds: float = 10.0,
    ) -> None:
        self._stub = stub
        self._patience_seconds = patience_seconds
        self._deadline_seconds = deadline_seconds

    # --- the life of a run --------------------------------------------------------------------

    async def start_run(
        self,
        run_id: str,
        settings: RunSettings | Mapping[str, Any],
        *,
        queue: bool = False,
        until_step: int = 0,
    ) -> pb.Run:
        """Start or resume a run; with `queue` it waits for its turn, with `until_step` it pauses
        when so many steps are committed."""
        request = pb.StartRunRequest(
            run_id=run_id, settings=_settings(settings), queue=queue, until_step=until_step
        )
        return (await self._call(self._stub.StartRun, request, _LONG_DEADLINE_SECONDS)).run

    async def validate_run(self, run_id: str, settings: RunSettings | Mapping[str, Any]) -> None:
        """Let the coordinator check settings and data as it sees them; nothing starts."""
        request = pb.StartRunRequest(
            run_id=run_id, settings=_settings(settings), validate_only=True
        )
        await self._call(self._stub.StartRun, request, _LONG_DEADLINE_SECONDS)

    async def stop_run(
        self, run_id: str, mode: pb.StopMode.ValueType = pb.STOP_MODE_AFTER_STEP
    ) -> pb.Run:
        request = pb.StopRunRequest(run_id=run_id, mode=mode)
        return (await self._call(self._stub.StopRun, request, _LONG_DEADLINE_SECONDS)).run

    async def pause_run(
        self, run_id: str, mode: pb.PauseMode.ValueType = pb.PAUSE_MODE_AFTER_STEP
    ) -> pb.Run:
        request = pb.PauseRunRequest(run_id=run_id, mode=mode)
        return (await self._call(self._stub.PauseRun, request, _LONG_DEADLINE_SECONDS)).run

    async def resume_run(self, run_id: str, until_step: int = 0) -> pb.Run:
        """Go on, to the end or until so many steps are committed."""
        request = pb.ResumeRunRequest(run_id=run_id, until_step=until_step)
        return (await self._call(self._stub.ResumeRun, request)).run

    async def step_run(self, run_id: str) -> pb.Run:
        """Let a paused run do a single step; returns at once."""
        return await self.resume_run(run_id, (await self.get_run(run_id)).step + 1)

    # --- changes ------------------------------------------------------------------------------

    async def update_run(self, run_id: str, settings: Mapping[str, Any]) -> pb.Run:
        """Change settings, nested as in a run file, from the next round on."""
        request = pb.UpdateRunRequest(run_id=run_id, settings=_struct(settings))
        return (await self._call(self._stub.UpdateRun, request)).run

    async def force_long_round(self, run_id: str) -> pb.Run:
        request = pb.ForceLongRoundRequest(run_id=run_id)
        return (await self._call(self._stub.ForceLongRound, request)).run

    async def save_checkpoint(self, run_id: str) -> int:
        """Returns the weight version that it holds."""
        request = pb.SaveCheckpointRequest(run_id=run_id)
        answer = await self._call(self._stub.SaveCheckpoint, request, _LONG_DEADLINE_SECONDS)
        return answer.weight_version

    async def add_prompts(
        self, run_id: str, rows: Sequence[Mapping[str, Any]]
    ) -> pb.AddPromptsResponse:
        """Rows as in the data file, each with a `prompt_id`; at most 1000."""
        request = pb.AddPromptsRequest(run_id=run_id, rows=[_struct(row) for row in rows])
        return await self._call(self._stub.AddPrompts, request, _LONG_DEADLINE_SECONDS)

    async def requeue_draws(self, run_id: str, draws: Iterable[DrawId], level: int) -> pb.Run:
        request = pb.RequeueDrawsRequest(run_id=run_id, draws=map(_name, draws), level=level)
        return (await self._call(self._stub.RequeueDraws, request)).run

    async def drop_draws(self, run_id: str, draws: Iterable[DrawId], reason: str) -> pb.Run:
        request = pb.DropDrawsRequest(run_id=run_id, draws=map(_name, draws), reason=reason)
        return (await self._call(self._stub.DropDraws, request)).run

    async def run_evaluation(
        self, run_id: str, timeout_seconds: float = _LONG_DEADLINE_SECONDS
    ) -> pb.RunEvaluationResponse:
        request = pb.RunEvaluationRequest(run_id=run_id)
        return await self._call(self._stub.RunEvaluation, request, timeout_seconds)

    # --- what there is ------------------------------------------------------------------------

    async def get_run(self, run_id: str) -> pb.Run:
        return (await self._call(self._stub.GetRun, pb.GetRunRequest(run_id=run_id))).run

    async def list_runs(self) -> list[pb.Run]:
        """Newest first."""
        return list((await self._call(self._stub.ListRuns, pb.ListRunsRequest())).runs)

    async def list_steps(self, run_id: str, limit: int = 0) -> list[pb.Step]:
        """The newest `limit` committed steps (0: all of them), newest first."""
        steps: list[pb.Step] = []
        request = pb.ListStepsRequest(run_id=run_id)
        while True:
            request.page_size = min(limit - len(steps) if limit else _PAGE, _PAGE)
            page = await self._call(self._stub.ListSteps, request)
            steps += page.steps
            request.page_token = page.next_page_token
            if not request.page_token or len(steps) == limit:
                return steps

    async def list_samples(
        self, run_id: str, step: int, **filters: Any
    ) -> list[types_pb2.PromptGroup]:
        """All pages. `filters`: fields of ListSamplesRequest such as last_step or min_reward."""
        groups: list[types_pb2.PromptGroup] = []
        request = pb.ListSamplesRequest(run_id=run_id, step=step, **filters)
        while True:
            page = await self._call(self._stub.ListSamples, request, _LONG_DEADLINE_SECONDS)
            groups += page.groups
            request.page_token = page.next_page_token
            if not request.page_token:
                return groups

    async def list_deferred_draws(self, run_id: str) -> list[types_pb2.Draw]:
        """The long-prompt queue."""
        request = pb.ListDeferredDrawsRequest(run_id=run_id)
        return list((await self._call(self._stub.ListDeferredDraws, request)).draws)

    async def list_dropped_draws(self, run_id: str) -> list[pb.DroppedDraw]:
        request = pb.ListDeferredDrawsRequest(run_id=run_id)
        return list((await self._call(self._stub.ListDeferredDraws, request)).dropped)

    async def list_devices(self) -> list[pb.DeviceLease]:
        """The GPUs that workers hold, by name."""
        return list((await self._call(self._stub.ListDevices, pb.ListDevicesRequest())).leases)

    async def list_workers(self) -> list[pb.Worker]:
        return list((await self._call(self._stub.ListWorkers, pb.ListWorkersRequest())).workers)

    # --- streams ------------------------------------------------------------------------------

    async def regrade_samples(
        self, request: pb.RegradeSamplesRequest
    ) -> AsyncGenerator[pb.RegradeSamplesResponse, None]:
        """Each step as it is scored; there is no deadline, as long as steps come."""
        async for scored in client.stream(lambda: self._stub.RegradeSamples(request)):
            yield scored

    async def watch_run(
        self, run_id: str, after_revision: str = ""
    ) -> AsyncGenerator[pb.WatchRunResponse, None]:
        """Events until the run has ended; each once, also when the coordinator is away meanwhile.

        Where the first events are gone, goes on with the next that is kept. Once there was an
        event, waits for a coordinator that went away for at least half a minute, then raises
        UnavailableError.
        """
        request = pb.WatchRunRequest(run_id=run_id, after_revision=after_revision)
        last_contact, patience = time.monotonic(), self._patience_seconds
        while True:
            try:
                async for event in client.stream(lambda: self._stub.WatchRun(request)):
                    last_contact = time.monotonic()
                    patience = max(patience, _RECONNECT_PATIENCE_SECONDS)
                    if event.revision:
                        request.after_revision = event.revision
                    yield event
                return
            except errors.OutOfRangeError:
                request.after_revision = ""
            except (errors.UnavailableError, errors.CancelledError):
                if time.monotonic() - last_contact >= patience:
                    raise
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _call(
        self,
        method: Callable[..., Awaitable[Result]],
        request: object,
        deadline_seconds: float | None = None,
    ) -> Result:
        make = partial(method, request, timeout=deadline_seconds or self._deadline_seconds)
        return await client.call_until(make, seconds=self._patience_seconds, what="the coordinator")


@asynccontextmanager
async def connect(
    address: str,
    patience_seconds: float = 0.0,
    *,
    deadline_seconds: float = 10.0,
    security: Security | None = None,
) -> AsyncIterator[AsyncClient]:
    """A coordinator to call; connects when first used.

    `security` holds certificates and token; default: what the environment gives.
    """
    async with client.open_channel(address, security) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        yield AsyncClient(stub, patience_seconds, deadline_seconds)


def _settings(settings: RunSettings | Mapping[str, Any]) -> Struct:
    if isinstance(settings, RunSettings):
        return _struct(settings.model_dump(mode="json"))
    return _struct(settings)


def _struct(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(dict(values))
    return struct


def _name(draw: DrawId) -> pb.DrawName:
    return pb.DrawName(epoch=draw.epoch, prompt_id=draw.prompt_id)
