"""The trainer, as the driver sees it: calls that survive a restart of the trainer.

A trainer that was restarted has no open run and no open step; the calls here open them again, and
the trainer reads the step's sample stream from its start. What it cannot repair is weights that
do not fit the step: then RewindError says what the trainer has.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.struct_pb2 import Struct

from rollpacker import wire
from rollpacker.observability.tracing import span
from rollpacker.rpc.client import call, call_until
from rollpacker.rpc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from rollpacker.settings import RunSettings
from rollpacker.types import Draw, StepResult
from rollpacker.v1 import coordinator_service_pb2, trainer_service_pb2, trainer_service_pb2_grpc
from services.coordinator.engine_rest import EngineRest
from services.coordinator.workers import WorkerRegistry

if TYPE_CHECKING:
    from rollpacker.v1.trainer_service_pb2_grpc import TrainerServiceAsyncStub

_AWAY_SECONDS = 600.0  # a restart with a large checkpoint takes minutes
_OPEN_SECONDS = 600.0
_SHORT_SECONDS = 60.0
_UPDATE_SECONDS = 300.0  # of an update, apart from its tokens
_SLOWEST_TOKENS_PER_SECOND = 50.0  # forward and backward of a 135 M model on one CPU core
_REOPEN = ("RUN_NOT_OPEN", "STEP_NOT_OPEN")
_REPAIRS = 3
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RewindError(Exception):
    """The trainer holds other weights than the run; `opened` is what OpenRun returned."""

    def __init__(self, opened: trainer_service_pb2.OpenRunResponse) -> None:
        super().__init__(f"the trainer is at weight version {opened.weight_version}")
        self.opened = opened


class TrainerClient:
    """The one trainer of a run."""

    def __init__(
        self, workers: WorkerRegistry, settings: RunSettings, run_id: str, fence: int
    ) -> None:
        self._workers = workers
        self._settings = settings
        self._run_id = run_id
        self._fence = fence
        self._engines = EngineRest(workers, run_id, fence)
        self._takes_turns = settings.placement == "colocated"
        self.use(settings)

    def use(self, settings: RunSettings) -> None:
        """Steps that start from now on have these values; the run stays open as it was opened."""
        self._learning_rate = settings.trainer.learning_rate
        self._temperature = settings.sampling.temperature

    async def open_run(self) -> trainer_service_pb2.OpenRunResponse:
        """Prepare the trainer for the run; returns the weights that it has."""
        request = trainer_service_pb2.OpenRunRequest(
            run_id=self._run_id,
            model_uri=f"file://{self._settings.model}",
            trainer_settings=_trainer_settings(self._settings),
            fence=self._fence,
            temperature=self._settings.sampling.temperature,
        )
        return await self._call(
            lambda stub: stub.OpenRun(request, timeout=_OPEN_SECONDS), "OpenRun", rests=True
        )

    async def start_step(self, step: int) -> None:
        """Let gradients of a step accumulate. Raises RewindError."""
        request = trainer_service_pb2.StartStepRequest(
            run_id=self._run_id,
            step=step,
            weight_version=step,
            fence=self._fence,
            learning_rate=self._learning_rate,
            temperature=self._temperature,
        )
        await self._repaired(
            step, lambda stub: stub.StartStep(request, timeout=_SHORT_SECONDS), "StartStep"
        )

    async def finish_step(
        self, step: int, draws: Sequence[Draw], snapshot_json: str, tokens: int
    ) -> StepResult:
        """Apply the update of a step; `tokens` (trained) bounds its time. Raises RewindError."""
        request = trainer_service_pb2.FinishStepRequest(
            run_id=self._run_id,
            step=step,
            draws=[wire.draw_to_proto(draw) for draw in draws],
            fence=self._fence,
            run_snapshot_json=snapshot_json,
        )
        seconds = _UPDATE_SECONDS + tokens / _SLOWEST_TOKENS_PER_SECOND
        answer = await self._repaired(
            step, lambda stub: stub.FinishStep(request, timeout=seconds), "FinishStep"
        )
        return wire.step_result_from_proto(answer)

    async def abandon_step(self, step: int, seconds: float = _SHORT_SECONDS) -> None:
        """Drop the gradients of a step that will not finish."""
        request = trainer_service_pb2.AbandonStepRequest(
            run_id=self._run_id, step=step, fence=self._fence
        )
        await self._call(
            lambda stub: stub.AbandonStep(request, timeout=seconds), "AbandonStep", seconds
        )

    async def save_checkpoint(self) -> int:
        """Have a checkpoint written of the weights as they are; returns their version."""
        request = trainer_service_pb2.TrainerServiceSaveCheckpointRequest(
            run_id=self._run_id, fence=self._fence
        )

        def save(
            stub: TrainerServiceAsyncStub,
        ) -> Awaitable[trainer_service_pb2.TrainerServiceSaveCheckpointResponse]:
            return stub.SaveCheckpoint(request, timeout=_OPEN_SECONDS)

        try:
            answer = await self._call(save, "SaveCheckpoint")
        except FailedPreconditionError as error:
            if error.reason not in _REOPEN:
                raise
            await self.open_run()
            answer = await self._call(save, "SaveCheckpoint")
        return answer.weight_version

    async def _repaired(
        self, step: int, make: Callable[[TrainerServiceAsyncStub], Awaitable[Result]], what: str
    ) -> Result:
        """A call about a step; what a restart of the trainer closed is opened again."""
        for _ in range(_REPAIRS):
            try:
                return await self._call(make, what, rests=True)
            except FailedPreconditionError as error:
                if error.reason not in (*_REOPEN, "WEIGHT_VERSION_MISMATCH"):
                    raise
                _log.warning("%s of step %d: %s; opening the run again", what, step, error)
            opened = await self.open_run()
            if opened.weight_version not in (step, step + 1):
                raise RewindError(opened)
            if what != "StartStep" and opened.weight_version == step:
                await self.start_step(step)
        return await self._call(make, what, rests=True)

    async def _call(
        self,
        make: Callable[[TrainerServiceAsyncStub], Awaitable[Result]],
        what: str,
        away_seconds: float = _AWAY_SECONDS,
        *,
        rests: bool = False,
    ) -> Result:
        """`rests`: it works on devices. Engines that share them rest meanwhile; others let go of
        theirs when the trainer says that all are held: there are more engines than devices, or
        those of a run before have them still."""
        worker = await self._workers.least_busy(coordinator_service_pb2.WORKER_KIND_TRAINER)

        async def attempt() -> Result:
            """On the trainer that is alive now: it may have come back at another address."""
            alive = self._workers.alive(coordinator_service_pb2.WORKER_KIND_TRAINER)
            channel = (alive[0] if alive else worker).channel
            try:
                return await call(
                    lambda: make(trainer_service_pb2_grpc.TrainerServiceStub(channel))
                )
            except UnavailableError as error:
                if rests and error.reason == "DEVICES_BUSY" and not self._takes_turns:
                    await self._engines.let_go()
                raise

        rest = self._engines.resting() if self._takes_turns and rests else nullcontext()
        try:
            async with rest:
                with span(what, run=self._run_id):
                    return await call_until(
                        attempt, seconds=away_seconds, what=f"the trainer ({what})"
                    )
        except (UnavailableError, DeadlineExceededError) as error:
            raise type(error)(
                error.reason,
                f"the trainer does not answer {what}: {error.message}; look at its log, let it run,"
                " and start the run again with the same settings",
            ) from error


def _trainer_settings(settings: RunSettings) -> Struct:
    """The `trainer` section, and the numbers of other sections that the normaliser needs."""
    values: dict[str, Any] = settings.trainer.model_dump(mode="json")
    values["offload"] = settings.trainer.offload or settings.placement == "colocated"
    values["prompts_per_step"] = settings.tail_batching.prompts_per_step
    values["responses_per_prompt"] = settings.tail_batching.responses_per_prompt
    values["max_response_tokens"] = settings.sampling.max_response_tokens
    struct = Struct()
    struct.update(values)
    return struct
