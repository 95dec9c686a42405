"""The coordinator as the commands see it: one method per call, each with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, TypeVar

import typer
from google.protobuf.struct_pb2 import Struct

from rollpacker.rpc import client, errors
from rollpacker.settings import RunSettings
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from rollpacker.v1 import types_pb2

DEFAULT_PORT = 7777
_DEADLINE_SECONDS = 10.0
_START_DEADLINE_SECONDS = 120.0  # it reads the data set
_STEPS_PER_PAGE = 1000
_RECONNECT_SECONDS = 0.5
_RECONNECT_PATIENCE_SECONDS = 30.0

CoordinatorAddress = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="ROLLPACKER_COORDINATOR",
        metavar="HOST:PORT",
        help="Where the coordinator listens.",
    ),
]
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
Result = TypeVar("Result")


class Coordinator:
    """Calls to one coordinator. All raise rollpacker.rpc.errors.ServiceError.

    Every call may be repeated, so one that meets a coordinator that is away is tried again for up
    to `patience_seconds`.
    """

    def __init__(
        self, stub: pb_grpc.CoordinatorServiceAsyncStub, patience_seconds: float = 0.0
    ) -> None:
        self._stub = stub
        self._patience_seconds = patience_seconds

    async def start_run(self, run_id: str, settings: RunSettings) -> pb.Run:
        return await self._start_run(run_id, settings, validate_only=False)

    async def validate_run(self, run_id: str, settings: RunSettings) -> None:
        """Let the coordinator check settings and data as it sees them; nothing starts."""
        await self._start_run(run_id, settings, validate_only=True)

    async def _start_run(
        self, run_id: str, settings: RunSettings, *, validate_only: bool
    ) -> pb.Run:
        values = Struct()
        values.update(settings.model_dump(mode="json"))
        request = pb.StartRunRequest(run_id=run_id, settings=values, validate_only=validate_only)
        make = partial(self._stub.StartRun, request, timeout=_START_DEADLINE_SECONDS)
        return (await self._call(make)).run

    async def get_run(self, run_id: str) -> pb.Run:
        request = pb.GetRunRequest(run_id=run_id)
        make = partial(self._stub.GetRun, request, timeout=_DEADLINE_SECONDS)
        return (await self._call(make)).run

    async def list_runs(self) -> list[pb.Run]:
        make = partial(self._stub.ListRuns, pb.ListRunsRequest(), timeout=_DEADLINE_SECONDS)
        return list((await self._call(make)).runs)

    async def stop_run(self, run_id: str, mode: pb.StopMode.ValueType) -> pb.Run:
        request = pb.StopRunRequest(run_id=run_id, mode=mode)
        make = partial(self._stub.StopRun, request, timeout=_DEADLINE_SECONDS)
        return (await self._call(make)).run

    async def run_evaluation(self, run_id: str, timeout_seconds: float) -> pb.RunEvaluationResponse:
        request = pb.RunEvaluationRequest(run_id=run_id)
        make = partial(self._stub.RunEvaluation, request, timeout=timeout_seconds)
        return await self._call(make)

    async def list_steps(self, run_id: str, limit: int = 0) -> list[pb.Step]:
        """The newest `limit` committed steps (0: all of them), newest first."""
        steps: list[pb.Step] = []
        token = ""
        while True:
            size = min(limit - len(steps) if limit else _STEPS_PER_PAGE, _STEPS_PER_PAGE)
            request = pb.ListStepsRequest(run_id=run_id, page_size=size, page_token=token)
            make = partial(self._stub.ListSteps, request, timeout=_DEADLINE_SECONDS)
            page = await self._call(make)
            steps += page.steps
            token = page.next_page_token
            if not token or len(steps) == limit:
                return steps

    async def list_samples(self, run_id: str, step: int) -> list[types_pb2.PromptGroup]:
        request = pb.ListSamplesRequest(run_id=run_id, step=step)
        make = partial(self._stub.ListSamples, request, timeout=_DEADLINE_SECONDS)
        return list((await self._call(make)).groups)

    async def list_deferred_draws(self, run_id: str) -> list[types_pb2.Draw]:
        request = pb.ListDeferredDrawsRequest(run_id=run_id)
        make = partial(self._stub.ListDeferredDraws, request, timeout=_DEADLINE_SECONDS)
        return list((await self._call(make)).draws)

    async def list_workers(self) -> list[pb.Worker]:
        make = partial(self._stub.ListWorkers, pb.ListWorkersRequest(), timeout=_DEADLINE_SECONDS)
        return list((await self._call(make)).workers)

    async def regrade_samples(
        self, request: pb.RegradeSamplesRequest
    ) -> AsyncIterator[pb.RegradeSamplesResponse]:
        """Each step as it is scored; there is no deadline, as long as steps come."""
        async for scored in client.stream(lambda: self._stub.RegradeSamples(request)):
            yield scored

    async def watch_run(self, run_id: str) -> AsyncIterator[pb.WatchRunResponse]:
        """Events until the run has ended; each once, also when the coordinator is away meanwhile.

        Where the first events are gone, goes on with the next that is kept. Once there was an
        event, waits for a coordinator that went away for at least half a minute, then raises
        UnavailableError.
        """
        request = pb.WatchRunRequest(run_id=run_id)
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

    async def _call(self, make: Callable[[], Awaitable[Result]]) -> Result:
        return await client.call_until(make, seconds=self._patience_seconds, what="the coordinator")


@asynccontextmanager
async def connect(address: str, patience_seconds: float = 0.0) -> AsyncIterator[Coordinator]:
    """A coordinator to call; connects when first used."""
    async with client.open_channel(address) as channel:
        yield Coordinator(pb_grpc.CoordinatorServiceStub(channel), patience_seconds)
