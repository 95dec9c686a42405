"""A run that is open: its weights in the ranks, on disk, and in the results kept in Redis.

Order of what an update leaves behind: weights in memory -> checkpoint and publication, side by
side -> (in one assignment) `progress` -> result in Redis -> groups acknowledged. A crash before the
checkpoint is complete loses the update and nothing else; a crash after it loses nothing, for `load`
records the result that Redis lacks. What comes after `progress` may be repeated, and is, by
`result_of`. Where only some steps have a checkpoint, a step may be lost anyway: there nobody waits
until one is complete, but the next one.

Results in Redis of steps that the loaded weights do not contain (more than one step lay between
two checkpoints) speak of updates that are lost; `load` removes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from redis.asyncio import Redis

from rollpacker.rpc.errors import FailedPreconditionError, NotFoundError
from rollpacker.store import keys
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import Draw, StepResult
from services.trainer.checkpoint import Checkpoint, CheckpointRecord, CheckpointStore
from services.trainer.checkpoint_writer import CheckpointWriter
from services.trainer.leader import Leader
from services.trainer.metrics import step_metrics
from services.trainer.model_loading import ModelNotFoundError
from services.trainer.open_step import OpenStep
from services.trainer.redis_retry import through_restarts
from services.trainer.replica import Open, PutAway
from services.trainer.settings import RunSpec
from services.trainer.update import UpdateOutcome
from services.trainer.weight_publisher import WeightPublisher

_MAX_SKIPPED_UPDATES = 3  # in a row; the last one fails
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an open run, and the coordinator's snapshot that belongs to them."""

    weight_version: int
    weights_uri: str
    run_snapshot_json: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    weights: Weights
    result: StepResult | None  # of step weight_version - 1
    skipped_updates_in_a_row: int


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories of all runs."""

    weights: Path
    checkpoints: Path


class OpenRun:
    """The open run of the trainer; used under the session's lock."""

    def __init__(
        self,
        redis: Redis,
        leader: Leader,
        spec: RunSpec,
        roots: Roots,
        newest: Checkpoint | None,
        vocabulary_size: int,
    ) -> None:
        self.spec = spec
        self.vocabulary_size = vocabulary_size
        self.settings_hash = spec.settings_hash()
        self._redis = redis
        self._leader = leader
        self._checkpoints = CheckpointWriter(leader, _checkpoints(roots, spec))
        self._publisher = WeightPublisher(roots.weights / spec.run_id, spec.model_directory)
        self._unacknowledged: OpenStep | None = None
        record = newest.record if newest else None
        version = record.weight_version if record else 0
        snapshot = record.run_snapshot_json if record else ""
        self.progress = Progress(
            Weights(version, self._publisher.uri(version), snapshot),
            record.result if record else None,
            record.skipped_updates_in_a_row if record else 0,
        )

    @classmethod
    async def load(
        cls,
        redis: Redis,
        leader: Leader,
        spec: RunSpec,
        roots: Roots,
        devices: tuple[str, ...] = (),
    ) -> OpenRun:
        """The newest checkpoint of the run, or else the initial model, loaded and published.

        `devices`: of the ranks, where they are claimed.

        Raises FailedPreconditionError (SETTINGS_DIFFER), NotFoundError (MODEL_NOT_FOUND).
        """
        newest = _checkpoints(roots, spec).newest()
        if newest and newest.record.settings_hash != spec.settings_hash():
            raise settings_differ(spec.run_id)
        path = newest.path if newest else None
        command = Open(spec.model_directory, spec.settings, spec.temperature, path, devices)
        try:
            vocabulary_size = await leader.open(command)
        except ModelNotFoundError as error:
            raise NotFoundError("MODEL_NOT_FOUND", str(error)) from error
        run = cls(redis, leader, spec, roots, newest, vocabulary_size)
        await run._publish(run.weight_version, with_base=True)
        await run._reconcile_results()
        _log.info("run %s is open at weight version %d", spec.run_id, run.weight_version)
        return run

    @property
    def weight_version(self) -> int:
        return self.progress.weights.weight_version

    async def update(
        self, open_step: OpenStep, draws: tuple[Draw, ...], run_snapshot_json: str
    ) -> None:
        """One update from the sums, saved and published.

        Raises FailedPreconditionError (NON_FINITE_GRADIENTS) at the third skipped one in a row.
        """
        start = time.monotonic()
        outcome = await self._leader.update()
        skipped = self.progress.skipped_updates_in_a_row + 1 if outcome.skipped else 0
        if outcome.skipped:
            _refuse_third_skip(open_step, outcome, skipped)
        version = open_step.step + 1
        metrics = step_metrics(
            outcome,
            trained_responses=open_step.packer.trained_responses,
            accumulate_seconds=open_step.accumulate_seconds,
            update_seconds=time.monotonic() - start,
        )
        result = StepResult(version, self._publisher.uri(version), draws, metrics)
        record = CheckpointRecord(result, self.settings_hash, run_snapshot_json, skipped)
        timings = await self._save_and_publish(record)
        self.progress = Progress(
            Weights(version, result.weights_uri, run_snapshot_json),
            replace(result, metrics={**metrics, **timings}),
            skipped,
        )
        self._unacknowledged = open_step

    async def save(self) -> int:
        """Write a checkpoint of the weights as they are, unless there is one; returns the version.

        The initial model needs none.
        """
        result, newest = self.progress.result, await self._checkpoints.newest()
        if result and (newest is None or newest.record.weight_version != self.weight_version):
            snapshot = self.progress.weights.run_snapshot_json
            skipped = self.progress.skipped_updates_in_a_row
            await self._save(CheckpointRecord(result, self.settings_hash, snapshot, skipped))
        return self.weight_version

    async def result_of(self, step: int) -> StepResult:
        """The result of a finished step; that of the last one is recorded, its groups acked.

        Raises FailedPreconditionError (STEP_NOT_OPEN) for a result that is no longer kept, and
        UnavailableError when Redis stays away.
        """
        if self.progress.result and step == self.weight_version - 1:
            await self._record(step, self.progress.result)
            if self._unacknowledged:
                await through_restarts(self._unacknowledged.acknowledge, "acknowledging groups")
                self._unacknowledged = None
            return self.progress.result
        result = await self._recorded(step)
        if result is None:
            raise FailedPreconditionError(
                "STEP_NOT_OPEN",
                f"step {step} was finished long before weight version {self.weight_version},"
                " and its result is no longer kept",
            )
        return result

    async def close(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        await self._checkpoints.complete()

    async def _reconcile_results(self) -> None:
        """Make the results in Redis say what the loaded weights say."""
        step, result = self.weight_version, self.progress.result
        if result:
            recorded = await self._recorded(step - 1)
            if recorded and recorded.draws == result.draws:
                self.progress = replace(self.progress, result=recorded)  # has all times
            else:
                await self._record(step - 1, result)
        while await self._remove_result(step):
            _log.warning("step %d is to be done again: its update is lost", step)
            step += 1

    async def _save_and_publish(self, record: CheckpointRecord) -> Mapping[str, float]:
        """Returns how long each kept the caller waiting."""
        start = time.monotonic()
        interval = self.spec.settings.checkpoint_interval
        if record.weight_version % interval == 0:
            await self._checkpoints.begin(record)
        begun = time.monotonic()
        await self._publish(record.weight_version)
        published = time.monotonic()
        if interval == 1:
            await self._checkpoints.complete()
        return {
            "checkpoint_seconds": begun - start + time.monotonic() - published,
            "publish_seconds": published - begun,
        }

    async def _save(self, record: CheckpointRecord) -> None:
        await self._checkpoints.begin(record)
        await self._checkpoints.complete()

    async def _publish(self, version: int, *, with_base: bool = False) -> None:
        """`with_base`: where an adapter is published, anew the weights that it belongs to."""
        whole = await self._leader.gather_weights(with_base)
        await self._leader.in_thread(
            lambda: self._publisher.publish(version, whole.tensors, whole.config, whole.adapter)
        )
        if self.spec.settings.offload:
            await self._leader.everywhere(PutAway())

    async def _record(self, step: int, result: StepResult) -> None:
        stream = SampleStream(self._redis, self.spec.run_id, step)
        await through_restarts(
            lambda: stream.record_result(result), f"recording the result of step {step}"
        )

    async def _recorded(self, step: int) -> StepResult | None:
        stream = SampleStream(self._redis, self.spec.run_id, step)
        return await through_restarts(stream.result, f"result of step {step}")

    async def _remove_result(self, step: int) -> bool:
        """Whether there was one."""
        key = keys.step_result(self.spec.run_id, step)
        return bool(
            await through_restarts(lambda: self._redis.delete(key), f"old result of step {step}")
        )


def settings_differ(run_id: str) -> FailedPreconditionError:
    """A run that has taken steps cannot go on with other settings."""
    return FailedPreconditionError(
        "SETTINGS_DIFFER",
        f"run {run_id} has taken steps with other settings, another model or another temperature;"
        " go on with those, or start a run with another id",
    )


def _checkpoints(roots: Roots, spec: RunSpec) -> CheckpointStore:
    return CheckpointStore(roots.checkpoints / spec.run_id, spec.settings.keep_checkpoints)


def _refuse_third_skip(open_step: OpenStep, outcome: UpdateOutcome, skipped: int) -> None:
    """Raises NON_FINITE_GRADIENTS for the third skip in a row, and fails the step with it."""
    _log.warning(
        "step %d: gradient norm %s; the update is skipped", open_step.step, outcome.grad_norm
    )
    if skipped < _MAX_SKIPPED_UPDATES:
        return
    error = FailedPreconditionError(
        "NON_FINITE_GRADIENTS",
        f"step {open_step.step}: the gradient was not finite {skipped} times in a row; lower the"
        " learning rate or max_grad_norm, or go back to an older checkpoint",
    )
    open_step.fail(error)
    raise error
