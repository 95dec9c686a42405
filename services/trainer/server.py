"""TrainerService: checks the requests, translates them, and leaves the rest to `Session`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import grpc.aio

from rollpacker import wire
from rollpacker.rpc.errors import InvalidArgumentError, NotFoundError
from rollpacker.rpc.struct_values import read_struct
from rollpacker.v1 import trainer_service_pb2 as pb
from rollpacker.v1 import trainer_service_pb2_grpc
from services.trainer.session import Activity, Session
from services.trainer.settings import RunSpec, parse_open_run_settings

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LONGEST_WAIT_SECONDS = 60.0  # for draws that are not in the stream
_REPLY_SECONDS = 0.5  # of the caller's deadline, kept for the answer
_STATES = {
    Activity.IDLE: pb.GetTrainerResponse.STATE_IDLE,
    Activity.ACCUMULATING: pb.GetTrainerResponse.STATE_ACCUMULATING,
    Activity.UPDATING: pb.GetTrainerResponse.STATE_UPDATING,
}
Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """One trainer; every method is a contract of trainer_service.proto."""

    def __init__(self, session: Session, world_size: int) -> None:
        self._session = session
        self._world_size = world_size

    async def OpenRun(self, request: pb.OpenRunRequest, _context: Context) -> pb.OpenRunResponse:
        weights = await self._session.open_run(_run_spec(request), request.fence)
        return pb.OpenRunResponse(
            weight_version=weights.weight_version,
            weights_uri=weights.weights_uri,
            run_snapshot_json=weights.run_snapshot_json,
        )

    async def StartStep(
        self, request: pb.StartStepRequest, _context: Context
    ) -> pb.StartStepResponse:
        _check_step(request.step)
        learning_rate = request.learning_rate if request.HasField("learning_rate") else None
        if learning_rate is not None and not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise InvalidArgumentError.field(
                "learning_rate", f"{learning_rate} is below 0 or no number; give one from 0 on"
            )
        temperature = request.temperature if request.HasField("temperature") else None
        if temperature is not None:
            _check_temperature(temperature)
        await self._session.start_step(
            request.run_id,
            request.step,
            request.weight_version,
            request.fence,
            learning_rate=learning_rate,
            temperature=temperature,
        )
        return pb.StartStepResponse()

    async def SaveCheckpoint(
        self, request: pb.TrainerServiceSaveCheckpointRequest, _context: Context
    ) -> pb.TrainerServiceSaveCheckpointResponse:
        version = await self._session.save_checkpoint(request.run_id, request.fence)
        return pb.TrainerServiceSaveCheckpointResponse(weight_version=version)

    async def FinishStep(
        self, request: pb.FinishStepRequest, context: Context
    ) -> pb.FinishStepResponse:
        _check_step(request.step)
        draws = [wire.draw_from_proto(draw) for draw in request.draws]
        if len({draw.id for draw in draws}) != len(draws):
            raise InvalidArgumentError.field("draws", "a draw is named twice; name each once")
        result = await self._session.finish_step(
            request.run_id,
            request.step,
            draws,
            request.run_snapshot_json,
            request.fence,
            _wait_seconds(context.time_remaining()),
        )
        return wire.step_result_to_proto(result)

    async def AbandonStep(
        self, request: pb.AbandonStepRequest, _context: Context
    ) -> pb.AbandonStepResponse:
        _check_step(request.step)
        await self._session.abandon_step(request.run_id, request.step, request.fence)
        return pb.AbandonStepResponse()

    async def GetTrainer(
        self, _request: pb.GetTrainerRequest, _context: Context
    ) -> pb.GetTrainerResponse:
        session = self._session
        return pb.GetTrainerResponse(
            run_id=session.run_id,
            step=session.weight_version,
            weight_version=session.weight_version,
            state=_STATES[session.activity],
            accumulated_group_count=session.accumulated_group_count,
            world_size=self._world_size,
        )


def _run_spec(request: pb.OpenRunRequest) -> RunSpec:
    if not _RUN_ID.fullmatch(request.run_id):
        raise InvalidArgumentError.field(
            "run_id",
            f"{request.run_id!r} cannot name a directory; use letters, digits, '.', '_' and '-'",
        )
    _check_temperature(request.temperature)
    settings = parse_open_run_settings(read_struct("trainer_settings", request.trainer_settings))
    return RunSpec(
        run_id=request.run_id,
        model_directory=_model_directory(request.model_uri),
        settings=settings,
        temperature=request.temperature,
    )


def _model_directory(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidArgumentError.field(
            "model_uri", f"{uri!r} is no local model; give file:///absolute/directory"
        )
    directory = Path(unquote(parts.path))
    if not directory.is_dir():
        raise NotFoundError("MODEL_NOT_FOUND", f"model_uri: {directory} is not a directory")
    return directory


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise InvalidArgumentError.field(
            "temperature", f"{temperature} is not above 0; give the sampling temperature"
        )


def _check_step(step: int) -> None:
    if step < 0:
        raise InvalidArgumentError.field("step", f"{step} is below 0; steps count from 0")


def _wait_seconds(remaining: float | None) -> float:
    """How long FinishStep may wait for draws, so that its own answer still arrives."""
    if remaining is None:
        return _LONGEST_WAIT_SECONDS
    return max(0.0, min(_LONGEST_WAIT_SECONDS, remaining - _REPLY_SECONDS))
