"""The reward service over gRPC: validate, translate, delegate, map errors."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from rollpacker import wire
from rollpacker.rpc import errors
from rollpacker.rpc.server import RpcServer
from rollpacker.types import GraderKind
from rollpacker.v1 import reward_service_pb2 as pb
from rollpacker.v1 import reward_service_pb2_grpc as pb_grpc
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingTask,
)
from services.reward.graders.registry import graders
from services.reward.scheduler import RewardScheduler
from services.reward.worker_pool import SlotsBusyError, WorkerPool
from services.reward.worker_process import GradingOutcome, WorkerLostError

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RewardService"].full_name
_MAX_LOGGED_ANSWER = 200  # characters
_log = logging.getLogger(__name__)


class RewardServicer(pb_grpc.RewardServiceServicer):
    """Serves one pool through its scheduler; owns neither."""

    def __init__(
        self, pool: WorkerPool, scheduler: RewardScheduler, verdicts: Counter[tuple[str, str]]
    ) -> None:
        self._pool, self._scheduler = pool, scheduler
        self._verdicts = verdicts

    async def ScoreResponse(
        self, request: pb.ScoreResponseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScoreResponseResponse:
        task = _task(request)
        try:
            outcome = await self._scheduler.grade(request.run_id, request.prompt_id, task)
        except BadReferenceError as error:
            raise errors.InvalidArgumentError.field("reference_json", str(error)) from error
        except SlotsBusyError as error:
            raise errors.ResourceExhaustedError(
                "SLOTS_BUSY",
                f"{error}; try again in {error.retry_after_seconds:.1f} s or add slots",
                retry_after_seconds=error.retry_after_seconds,
            ) from error
        except GraderUnavailableError as error:
            raise errors.FailedPreconditionError("GRADER_UNAVAILABLE", str(error)) from error
        except WorkerLostError as error:
            raise errors.UnavailableError("WORKER_LOST", f"{error}; try again") from error
        except GraderFailedError as error:
            _log.error("response %s of run %s: %s", request.response_id, request.run_id, error)
            raise errors.InternalError(
                "GRADER_FAILED", f"response {request.response_id}: {error}"
            ) from error
        self._verdicts[task.grader_kind.value, outcome.score.verdict.value] += 1
        return _response(outcome)

    async def GetReward(
        self, request: pb.GetRewardRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetRewardResponse:
        return pb.GetRewardResponse(
            grader_kinds=[
                wire.grader_kind_to_proto(kind)
                for kind in graders()
                if kind not in self._pool.unavailable
            ],
            slot_count=self._pool.slot_count,
            busy_slot_count=self._pool.busy_slot_count,
            worker_restart_count=self._pool.worker_restart_count,
            killed_run_count=self._scheduler.counts.killed,
            rechecked_run_count=self._scheduler.counts.rechecked,
            false_kill_count=self._scheduler.counts.false_kills,
            unavailable_graders=[
                pb.UnavailableGrader(grader_kind=wire.grader_kind_to_proto(kind), reason=reason)
                for kind, reason in self._pool.unavailable.items()
            ],
        )


def make_server(
    address: str,
    pool: WorkerPool,
    scheduler: RewardScheduler,
    verdicts: Counter[tuple[str, str]] | None = None,
) -> RpcServer:
    """A server; the caller starts pool and scheduler. Raises InvalidArgumentError (address).

    `verdicts` counts what was graded, by (grader, verdict).
    """
    counts = Counter() if verdicts is None else verdicts
    return RpcServer(
        address,
        [SERVICE_NAME],
        lambda server: pb_grpc.add_RewardServiceServicer_to_server(
            RewardServicer(pool, scheduler, counts), server
        ),
    )


def _task(request: pb.ScoreResponseRequest) -> GradingTask:
    return GradingTask(
        _grader_kind(request.grader_kind),
        request.response_text,
        request.reference_json,
        request.prompt_text,
    )


def _grader_kind(value: int) -> GraderKind:
    """The kind, if it is offered. Raises InvalidArgumentError."""
    try:
        kind = wire.grader_kind_from_proto(value)
    except wire.WireError as error:
        raise errors.InvalidArgumentError.field("grader_kind", str(error)) from error
    if kind not in graders():
        offered = ", ".join(known.value for known in graders())
        raise errors.InvalidArgumentError.field(
            "grader_kind",
            f"{kind.value} is not offered here; offered: {offered}"
            " (reasoning_gym comes with the extra `reasoning-gym`)",
        )
    return kind


async def report_graders(server: RpcServer, pool: WorkerPool) -> None:
    """Set the health of each grader, by the name that the proto gives."""
    for kind in graders():
        name = f"{SERVICE_NAME}/{kind.value}"
        await server.set_part_serving(name, kind not in pool.unavailable)


def _response(outcome: GradingOutcome) -> pb.ScoreResponseResponse:
    score = outcome.score
    response = pb.ScoreResponseResponse(
        reward=score.reward,
        breakdown=score.breakdown,
        verdict=wire.verdict_to_proto(score.verdict),
        elapsed=_duration(outcome.elapsed_seconds),
        extracted_answer=score.extracted_answer[:_MAX_LOGGED_ANSWER],
    )
    if score.runs:
        response.program_cpu.CopyFrom(_duration(score.cpu_seconds))
        response.program_wall.CopyFrom(_duration(score.wall_seconds))
    return response


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
