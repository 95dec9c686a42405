"""What the trainer is doing, and the order in which it may do it.

    no run --open_run--> idle --start_step--> accumulating --finish_step--> updating --> idle
                           ^                       |
                           +-----abandon_step------+

Invariants:
- `weight_version` counts the updates applied, so step n can only start at weight version n, and a
  step below it is finished.
- An update is applied once: the weights, the version and the result change together, in memory,
  after the checkpoint and the publication were written. What follows (recording the result in
  Redis, acknowledging) may be repeated, and is, by the next FinishStep of that step.
- A call that was cancelled (its caller gave up) leaves the work running; a repeat joins it.
- Fences only grow; a call with a lower one changes nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis

from rollpacker.rpc.errors import FailedPreconditionError, NotFoundError, stale_fence
from rollpacker.store import keys
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import Draw, DrawId, StepResult
from services.trainer.checkpoint import Checkpoint, CheckpointRecord, CheckpointStore
from services.trainer.leader import Leader
from services.trainer.metrics import step_metrics
from services.trainer.model import ModelNotFoundError
from services.trainer.open_step import OpenStep
from services.trainer.redis_retry import through_restarts
from services.trainer.replica import DropSums, Open, SaveTensors
from services.trainer.settings import RunSpec
from services.trainer.update import UpdateOutcome
from services.trainer.weight_publisher import WeightPublisher

_MAX_SKIPPED_UPDATES = 3  # in a row; the last one fails
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Activity(enum.Enum):
    """What the trainer is doing."""

    IDLE = "idle"
    ACCUMULATING = "accumulating"
    UPDATING = "updating"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of an open run, and the coordinator's snapshot that belongs to them."""

    weight_version: int
    weights_uri: str
    run_snapshot_json: str


@dataclass(frozen=True, slots=True)
class _Run:
    """The open run: what is fixed, and what the last step left behind."""

    spec: RunSpec
    settings_hash: str
    checkpoints: CheckpointStore
    publisher: WeightPublisher
    weights: Weights
    result: StepResult | None = None  # of step weight_version - 1
    skipped_updates_in_a_row: int = 0


class Session:
    """The trainer's one run and its one open step; lives in the leader's event loop."""

    def __init__(
        self, redis: Redis, leader: Leader, weights_root: Path, checkpoint_root: Path
    ) -> None:
        self._redis = redis
        self._leader = leader
        self._weights_root = weights_root
        self._checkpoint_root = checkpoint_root
        self._fence = 0
        self._run: _Run | None = None
        self._step: OpenStep | None = None
        self._unacknowledged: OpenStep | None = None  # finished, but Redis was away
        self._update: asyncio.Task[StepResult] | None = None
        self._lock = asyncio.Lock()  # held while the run or the step changes

    @property
    def run_id(self) -> str:
        return self._run.spec.run_id if self._run else ""

    @property
    def weight_version(self) -> int:
        return self._run.weights.weight_version if self._run else 0

    @property
    def accumulated_group_count(self) -> int:
        return self._step.packer.group_count if self._step else 0

    @property
    def activity(self) -> Activity:
        if self._update:
            return Activity.UPDATING
        return Activity.ACCUMULATING if self._step else Activity.IDLE

    async def open_run(self, spec: RunSpec, fence: int) -> Weights:
        """OpenRun."""
        self._check_fence(fence)
        return await _uncancelled(self._open_run(spec))

    async def start_step(self, run_id: str, step: int, weight_version: int, fence: int) -> None:
        """StartStep."""
        self._check_fence(fence)
        await _uncancelled(self._start_step(run_id, step, weight_version))

    async def abandon_step(self, run_id: str, step: int, fence: int) -> None:
        """AbandonStep."""
        self._check_fence(fence)
        await _uncancelled(self._abandon_step(run_id, step))

    async def finish_step(
        self,
        run_id: str,
        step: int,
        draws: Sequence[Draw],
        run_snapshot_json: str,
        fence: int,
        wait_seconds: float,
    ) -> StepResult:
        """FinishStep; waits `wait_seconds` for draws that are not in the stream yet."""
        self._check_fence(fence)
        run = self._opened(run_id)
        if step >= run.weights.weight_version:
            open_step = self._open_step(step)
            await open_step.take_exactly([draw.id for draw in draws], wait_seconds)
            self._check_fence(fence)
            result = await self._update_once(open_step, draws, run_snapshot_json)
        else:
            result = await self._finished(run, step)
        _check_same_draws(step, result, {draw.id for draw in draws})
        return result

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise stale_fence(fence, self._fence)
        self._fence = fence

    def _opened(self, run_id: str) -> _Run:
        if self._run is None or self._run.spec.run_id != run_id:
            raise FailedPreconditionError(
                "RUN_NOT_OPEN",
                f"run {run_id} is not open ({self.run_id or 'none'} is); call OpenRun first",
            )
        return self._run

    def _open_step(self, step: int) -> OpenStep:
        if self._step is None or self._step.step != step:
            raise _step_not_open(step)
        return self._step

    async def _open_run(self, spec: RunSpec) -> Weights:
        async with self._lock:
            settings_hash = spec.settings_hash()
            run = self._run
            if run and (run.spec.run_id, run.settings_hash) == (spec.run_id, settings_hash):
                return run.weights
            if run and run.spec.run_id == spec.run_id and run.weights.weight_version > 0:
                raise _settings_differ(spec.run_id)
            await self._close_step()
            self._run = await self._load(spec, settings_hash)
            return self._run.weights

    async def _load(self, spec: RunSpec, settings_hash: str) -> _Run:
        """The newest checkpoint of the run, or else the initial model, loaded and published."""
        keep = spec.settings.keep_checkpoints
        checkpoints = CheckpointStore(self._checkpoint_root / spec.run_id, keep)
        newest = checkpoints.newest()
        if newest and newest.record.settings_hash != settings_hash:
            raise _settings_differ(spec.run_id)
        self._run = self._unacknowledged = None
        try:
            await self._leader.everywhere(
                Open(
                    spec.model_directory,
                    spec.settings,
                    spec.temperature,
                    newest.path if newest else None,
                )
            )
        except ModelNotFoundError as error:
            raise NotFoundError("MODEL_NOT_FOUND", str(error)) from error
        publisher = WeightPublisher(self._weights_root / spec.run_id, spec.model_directory)
        run = _resumed(spec, settings_hash, checkpoints, publisher, newest)
        await self._publish(publisher, run.weights.weight_version)
        await self._reconcile_results(run)
        _log.info("run %s is open at weight version %d", spec.run_id, run.weights.weight_version)
        return run

    async def _reconcile_results(self, run: _Run) -> None:
        """Make the recorded results say what the loaded weights say.

        The checkpoint's result is recorded where the crash came before that. Results of later
        steps speak of updates that are lost; they are removed, or a restarted coordinator would
        commit them.
        """
        run_id, step = run.spec.run_id, run.weights.weight_version
        if run.result:
            recorded = await self._recorded(run_id, step - 1)
            if recorded is None or recorded.draws != run.result.draws:
                await self._record(run_id, step - 1, run.result)
        while await self._remove_result(run_id, step):
            _log.warning("step %d is to be done again: its update is lost", step)
            step += 1

    async def _start_step(self, run_id: str, step: int, weight_version: int) -> None:
        async with self._lock:
            run = self._opened(run_id)
            version = run.weights.weight_version
            if step < version or (self._step and self._step.step == step):
                return
            if step != version or weight_version != version:
                raise FailedPreconditionError(
                    "WEIGHT_VERSION_MISMATCH",
                    f"the trainer holds weight version {version}, step {step} was sampled by"
                    f" {weight_version}; start step {version}, or open the run again",
                )
            self._step = OpenStep(
                self._redis, self._leader, run_id, step, run.spec.settings.micro_batch_tokens
            )

    async def _abandon_step(self, run_id: str, step: int) -> None:
        async with self._lock:
            if step < self._opened(run_id).weights.weight_version:
                raise FailedPreconditionError(
                    "STEP_FINISHED", f"the update of step {step} has been applied"
                )
            if self._step and self._step.step == step:
                await self._close_step()

    async def _close_step(self) -> None:
        """Under the lock: forget the open step and its sums."""
        if self._step:
            await self._step.close()
            await self._leader.everywhere(DropSums())
            self._step = None

    async def _update_once(
        self, open_step: OpenStep, draws: Sequence[Draw], run_snapshot_json: str
    ) -> StepResult:
        """Start the update, or join the one that another call has started."""
        if self._update is None:
            work = self._update_locked(open_step, tuple(draws), run_snapshot_json)
            self._update = asyncio.create_task(work)
            self._update.add_done_callback(self._update_ended)
        return await asyncio.shield(self._update)

    def _update_ended(self, _: asyncio.Task[StepResult]) -> None:
        self._update = None

    async def _update_locked(
        self, open_step: OpenStep, draws: tuple[Draw, ...], run_snapshot_json: str
    ) -> StepResult:
        async with self._lock:
            run = self._opened(open_step.run_id)
            if self._step is not open_step:  # in between it was updated or abandoned
                if open_step.step < run.weights.weight_version:
                    return await self._finished(run, open_step.step)
                raise _step_not_open(open_step.step)
            await open_step.flush([draw.id for draw in draws])
            self._run = run = await self._apply(run, open_step, draws, run_snapshot_json)
            self._step = None
            await open_step.close()
            self._unacknowledged = open_step
            return await self._finished(run, open_step.step)

    async def _apply(
        self, run: _Run, open_step: OpenStep, draws: tuple[Draw, ...], run_snapshot_json: str
    ) -> _Run:
        """Update, save and publish. Returns the run as it is after that."""
        start = time.monotonic()
        outcome = await self._leader.update()
        skipped = run.skipped_updates_in_a_row + 1 if outcome.skipped else 0
        if outcome.skipped:
            _refuse_third_skip(open_step, outcome, skipped)
        version = open_step.step + 1
        metrics = step_metrics(
            outcome,
            run.spec.settings,
            trained_responses=open_step.packer.trained_responses,
            accumulate_seconds=open_step.accumulate_seconds,
            update_seconds=time.monotonic() - start,
        )
        result = StepResult(version, run.publisher.uri(version), draws, metrics)
        record = CheckpointRecord(result, run.settings_hash, run_snapshot_json, skipped)
        timings = await self._save_and_publish(run, record)
        return replace(
            run,
            weights=Weights(version, result.weights_uri, run_snapshot_json),
            result=replace(result, metrics={**metrics, **timings}),
            skipped_updates_in_a_row=skipped,
        )

    async def _save_and_publish(self, run: _Run, record: CheckpointRecord) -> Mapping[str, float]:
        """Returns how long it took. The checkpoint comes first: what is published can be loaded."""
        start = time.monotonic()
        version = record.weight_version
        if version % run.spec.settings.checkpoint_interval == 0:
            partial = await self._leader.in_thread(lambda: run.checkpoints.begin(version))
            await self._leader.everywhere(SaveTensors(partial))
            await self._leader.in_thread(lambda: run.checkpoints.commit(partial, record))
        saved = time.monotonic()
        await self._publish(run.publisher, version)
        return {
            "checkpoint_seconds": saved - start,
            "publish_seconds": time.monotonic() - saved,
        }

    async def _publish(self, publisher: WeightPublisher, version: int) -> None:
        whole = await self._leader.gather_weights()
        await self._leader.in_thread(
            lambda: publisher.publish(version, whole.tensors, whole.config)
        )

    async def _finished(self, run: _Run, step: int) -> StepResult:
        """The result of a finished step; that of the last one is recorded, its groups acked."""
        run_id, version = run.spec.run_id, run.weights.weight_version
        if run.result and step == version - 1:
            await self._record(run_id, step, run.result)
            if self._unacknowledged:
                await through_restarts(self._unacknowledged.acknowledge, "acknowledging groups")
                self._unacknowledged = None
            return run.result
        result = await self._recorded(run_id, step)
        if result is None:
            raise FailedPreconditionError(
                "STEP_NOT_OPEN",
                f"step {step} was finished long before weight version {version}, and its result"
                " is no longer kept",
            )
        return result

    async def _record(self, run_id: str, step: int, result: StepResult) -> None:
        stream = SampleStream(self._redis, run_id, step)
        await through_restarts(
            lambda: stream.record_result(result), f"recording the result of step {step}"
        )

    async def _recorded(self, run_id: str, step: int) -> StepResult | None:
        stream = SampleStream(self._redis, run_id, step)
        return await through_restarts(stream.result, f"result of step {step}")

    async def _remove_result(self, run_id: str, step: int) -> bool:
        """Whether there was one."""
        key = keys.step_result(run_id, step)
        return bool(
            await through_restarts(lambda: self._redis.delete(key), f"old result of step {step}")
        )


async def _uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end even if the caller gives up meanwhile."""
    return await asyncio.shield(asyncio.create_task(work))


def _resumed(
    spec: RunSpec,
    settings_hash: str,
    checkpoints: CheckpointStore,
    publisher: WeightPublisher,
    newest: Checkpoint | None,
) -> _Run:
    record = newest.record if newest else None
    version = record.weight_version if record else 0
    snapshot = record.run_snapshot_json if record else ""
    return _Run(
        spec,
        settings_hash,
        checkpoints,
        publisher,
        weights=Weights(version, publisher.uri(version), snapshot),
        result=record.result if record else None,
        skipped_updates_in_a_row=record.skipped_updates_in_a_row if record else 0,
    )


def _step_not_open(step: int) -> FailedPreconditionError:
    return FailedPreconditionError(
        "STEP_NOT_OPEN", f"step {step} is not open; call StartStep first"
    )


def _settings_differ(run_id: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        "SETTINGS_DIFFER",
        f"run {run_id} has taken steps with other settings, another model or another temperature;"
        " go on with those, or start a run with another id",
    )


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


def _check_same_draws(step: int, result: StepResult, named: set[DrawId]) -> None:
    trained = {draw.id for draw in result.draws}
    if trained != named:
        raise FailedPreconditionError(
            "STEP_DRAWS_DIFFER",
            f"step {step} was finished with other draws: {len(trained - named)} of them are not"
            f" named, {len(named - trained)} named ones were not trained",
        )
