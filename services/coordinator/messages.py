"""Runs, steps and progress as messages of the coordinator's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from rollpacker import wire
from rollpacker.store.records import ChosenLadder, DroppedDraw, RunState
from rollpacker.types import StepRecord
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.progress import RoundProgress
from services.coordinator.workers import Worker

_STATES = {
    "running": pb.Run.STATE_RUNNING,
    "stopping": pb.Run.STATE_STOPPING,
    "succeeded": pb.Run.STATE_SUCCEEDED,
    "failed": pb.Run.STATE_FAILED,
    "stopped": pb.Run.STATE_STOPPED,
    "queued": pb.Run.STATE_QUEUED,
    "pausing": pb.Run.STATE_PAUSING,
    "paused": pb.Run.STATE_PAUSED,
}


def run_message(
    state: RunState,
    directory: str,
    *,
    queue_position: int = 0,
    change_count: int = 0,
    added_prompt_count: int = 0,
) -> pb.Run:
    """A run as it is reported; the counts are those of its logs."""
    return pb.Run(
        run_id=state.run_id,
        state=_STATES[state.status],
        step=state.step,
        weight_version=state.weight_version,
        deferred_draw_count=len(state.deferred),
        weights_uri=state.weights_uri,
        failure=state.failure,
        settings=_struct(state.settings),
        updated_settings=_struct(state.updated_settings),
        waiting_settings=_struct(state.waiting_settings),
        pending_change_count=max(0, change_count - state.change_count),
        pause_at_step=state.pause_at or 0,
        queue_position=queue_position,
        added_prompt_count=added_prompt_count,
        dropped_draw_count=len(state.dropped),
        planned_steps=state.planned_steps,
        create_time=wire.timestamp_to_proto(state.create_time),
        run_directory=directory,
    )


def dropped_message(dropped: DroppedDraw) -> pb.DroppedDraw:
    """A draw that will not be trained."""
    draw = wire.draw_to_proto(dropped.item.draw)
    return pb.DroppedDraw(draw=draw, reason=dropped.reason, step=dropped.step)


def step_message(record: StepRecord) -> pb.Step:
    """A committed step."""
    return pb.Step(
        step=record.step,
        round_kind=wire.round_kind_to_proto(record.round_kind),
        start_time=wire.timestamp_to_proto(record.start_time),
        end_time=wire.timestamp_to_proto(record.end_time),
        metrics=dict(record.metrics),
        level=record.level,
        draws=[wire.draw_to_proto(draw) for draw in record.draws],
        weight_version=record.weight_version,
        flat_draws=[wire.draw_to_proto(draw) for draw in record.flat_draws],
    )


def ladder_message(chosen: ChosenLadder) -> pb.LadderChoice:
    """What mode auto chose."""
    return pb.LadderChoice(
        step=chosen.step,
        speculation_factors=chosen.speculation_factors,
        reason=chosen.reason,
        tensor_parallel_sizes=chosen.tensor_parallel_sizes,
        selection_weights=chosen.selection_weights,
    )


def progress_message(progress: RoundProgress) -> pb.RoundProgress:
    """How far the round is."""
    return pb.RoundProgress(
        step=progress.step,
        round_kind=wire.round_kind_to_proto(progress.round_kind),
        launched_group_count=progress.launched,
        finished_group_count=progress.finished,
        kept_group_count=progress.kept,
        phase=progress.phase,
        level=progress.level,
    )


def worker_message(worker: Worker) -> pb.Worker:
    """A worker with a lease."""
    stats = worker.engine_stats
    return pb.Worker(
        worker_id=worker.worker_id,
        address=worker.address,
        kind=worker.kind,
        engine_stats=wire.engine_stats_to_proto(stats) if stats else None,
        lease_expire_time=wire.timestamp_to_proto(worker.lease_end),
        reward_slot_count=worker.reward_slot_count,
    )


def _struct(values: Mapping[str, Any]) -> Struct:
    struct = Struct()
    struct.update(dict(values))
    return struct
