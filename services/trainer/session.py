"""What the trainer is doing, and the order in which it may do it.

    no run --open_run--> idle --start_step--> accumulating --finish_step--> updating --> idle
                           ^                       |
                           +-----abandon_step------+

Invariants:
- `weight_version` counts the updates applied, so step n can only start at weight version n, and a
  step below it is finished.
- An update is applied once, whoever asks and however often; see `open_run` for what it leaves.
- A call that was cancelled (its caller gave up) leaves the work running; a repeat joins it.
- Fences only grow; a call with a lower one changes nothing.
- Devices that are claimed are held while a step is open, and for as long as a call works on them;
  a run without `offload` keeps them in between too.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from rollpacker.devices.holder import Devices, NoDevices
from rollpacker.rpc.errors import FailedPreconditionError, stale_fence
from rollpacker.types import Draw, DrawId, StepResult
from services.trainer.leader import Leader
from services.trainer.open_run import OpenRun, Roots, Weights, settings_differ
from services.trainer.open_step import OpenStep
from services.trainer.replica import BeginStep, DropSums, PutAway
from services.trainer.settings import RunSpec

_CLOSE_SECONDS = 20.0  # torchrun kills after 30
Result = TypeVar("Result")


class Activity(enum.Enum):
    """What the trainer is doing."""

    IDLE = "idle"
    ACCUMULATING = "accumulating"
    UPDATING = "updating"


class Session:
    """The trainer's one run and its one open step; lives in the leader's event loop."""

    def __init__(
        self,
        redis: Redis,
        leader: Leader,
        roots: Roots,
        devices: Devices | None = None,
        device_count: int = 1,
    ) -> None:
        """`device_count`: that the ranks need."""
        self._devices = devices or NoDevices()
        self._device_count = device_count
        self._redis = redis
        self._leader = leader
        self._roots = roots
        self._fence = 0
        self._run: OpenRun | None = None
        self._step: OpenStep | None = None
        self._update: asyncio.Task[StepResult] | None = None
        self._lock = asyncio.Lock()  # held while the run or the step changes

    @property
    def run_id(self) -> str:
        return self._run.spec.run_id if self._run else ""

    @property
    def weight_version(self) -> int:
        return self._run.weight_version if self._run else 0

    @property
    def accumulated_group_count(self) -> int:
        return self._step.packer.windowed_groups if self._step else 0

    @property
    def activity(self) -> Activity:
        if self._update:
            return Activity.UPDATING
        return Activity.ACCUMULATING if self._step else Activity.IDLE

    async def open_run(self, spec: RunSpec, fence: int) -> Weights:
        """OpenRun."""
        self._check_fence(fence)
        return await _uncancelled(self._open_run(spec))

    async def start_step(
        self,
        run_id: str,
        step: int,
        weight_version: int,
        fence: int,
        *,
        learning_rate: float | None = None,
        temperature: float | None = None,
    ) -> None:
        """StartStep; what is None is as OpenRun said."""
        self._check_fence(fence)
        spec = self._opened(run_id).spec
        begin = BeginStep(
            spec.settings.learning_rate if learning_rate is None else learning_rate,
            spec.temperature if temperature is None else temperature,
        )
        await _uncancelled(self._start_step(run_id, step, weight_version, begin))

    async def save_checkpoint(self, run_id: str, fence: int) -> int:
        """SaveCheckpoint; returns the version that it holds."""
        self._check_fence(fence)
        return await _uncancelled(self._save_checkpoint(run_id))

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
        if step >= run.weight_version:
            open_step = self._open_step(step)
            await open_step.take_exactly([draw.id for draw in draws], wait_seconds)
            self._check_fence(fence)
            result = await self._update_once(open_step, draws, run_snapshot_json)
        else:
            result = await run.result_of(step)
            await _uncancelled(self._rest())
        _check_same_draws(step, result, {draw.id for draw in draws})
        return result

    async def close(self) -> None:
        """Let an update that has begun come to its end, for a while; begin nothing more."""
        if self._update:
            await asyncio.wait({self._update}, timeout=_CLOSE_SECONDS)
        if self._step:
            await self._step.close()

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise stale_fence(fence, self._fence)
        self._fence = fence

    def _opened(self, run_id: str) -> OpenRun:
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
            run = self._run
            if run and run.spec.run_id == spec.run_id:
                if run.settings_hash == spec.settings_hash():
                    if run.spec.settings.offload and self._devices.held:
                        await self._close_step()
                        await self._give_back()
                    return run.progress.weights
                if run.weight_version > 0:
                    raise settings_differ(spec.run_id)
            await self._close_step()
            if run:
                await run.close()
            self._run = None
            devices = await self._devices.claim(self._device_count)
            try:
                self._run = await OpenRun.load(
                    self._redis, self._leader, spec, self._roots, devices
                )
            finally:
                await self._give_back()
            return self._run.progress.weights

    async def _start_step(
        self, run_id: str, step: int, weight_version: int, begin: BeginStep
    ) -> None:
        async with self._lock:
            run = self._opened(run_id)
            version = run.weight_version
            if step < version or (self._step and self._step.step == step):
                return
            if step != version or weight_version != version:
                raise FailedPreconditionError(
                    "WEIGHT_VERSION_MISMATCH",
                    f"the trainer holds weight version {version}, step {step} was sampled by"
                    f" {weight_version}; start step {version}, or open the run again",
                )
            await self._devices.claim(self._device_count)
            await self._leader.everywhere(begin)
            self._step = OpenStep(
                self._redis, self._leader, run_id, step, run.spec.settings, run.vocabulary_size
            )

    async def _save_checkpoint(self, run_id: str) -> int:
        async with self._lock:  # an update that is under way holds it
            return await self._opened(run_id).save()

    async def _abandon_step(self, run_id: str, step: int) -> None:
        async with self._lock:
            if step < self._opened(run_id).weight_version:
                raise FailedPreconditionError(
                    "STEP_FINISHED", f"the update of step {step} has been applied"
                )
            if self._step and self._step.step == step:
                await self._close_step()
            await self._give_back()

    async def _rest(self) -> None:
        async with self._lock:
            await self._give_back()

    async def _give_back(self) -> None:
        """Under the lock: between steps a run with `offload` holds no devices."""
        keeps = self._run is not None and not self._run.spec.settings.offload
        if self._devices.held and self._step is None and not keeps:
            await self._leader.everywhere(PutAway())
            await self._devices.release()

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
                if open_step.step < run.weight_version:
                    return await run.result_of(open_step.step)
                raise _step_not_open(open_step.step)
            await open_step.flush([draw.id for draw in draws])
            await run.update(open_step, draws, run_snapshot_json)
            self._step = None
            await open_step.close()
            result = await run.result_of(open_step.step)
            await self._give_back()
            return result


async def _uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end even if the caller gives up meanwhile."""
    return await asyncio.shield(asyncio.create_task(work))


def _step_not_open(step: int) -> FailedPreconditionError:
    return FailedPreconditionError(
        "STEP_NOT_OPEN", f"step {step} is not open; call StartStep first"
    )


def _check_same_draws(step: int, result: StepResult, named: set[DrawId]) -> None:
    trained = {draw.id for draw in result.draws}
    if trained != named:
        raise FailedPreconditionError(
            "STEP_DRAWS_DIFFER",
            f"step {step} was finished with other draws: {len(trained - named)} of them are not"
            f" named, {len(named - trained)} named ones were not trained",
        )
