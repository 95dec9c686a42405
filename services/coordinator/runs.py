"""The runs of a coordinator: at most one is driven at a time, under the lease.

    (no run) --StartRun--> driving --run ended--> succeeded | stopped | failed
                 ^            |
                 +- restart --+   a coordinator that comes back goes on with the run it finds open

`Runs` owns the lease, the driver's task and the live progress. Losing the lease ends the process:
another coordinator is at work, and every later write of this one would be refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollpacker.data.errors import DataError
from rollpacker.data.run_data import RunData, load_run_data
from rollpacker.rpc.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from rollpacker.settings import RunSettings, SettingsError, parse_run_settings
from rollpacker.store.lease import CoordinatorLease
from rollpacker.store.records import LayoutError, RunState
from rollpacker.store.run_store import RunStore, StaleFenceError, list_run_ids
from rollpacker.tasks import end_tasks
from services.coordinator.command_runner import RoundFailedError
from services.coordinator.driver import RunDriver
from services.coordinator.outputs import RunDirectoryError, RunOutputs
from services.coordinator.progress import RoundProgress
from services.coordinator.run_context import RunContext
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.validation import Measurement
from services.coordinator.workers import WorkerRegistry

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_OPEN = ("running", "stopping")
_STANDBY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """Another coordinator has taken over."""


class Runs:
    """See the top of the file."""

    def __init__(
        self, redis: Redis, settings: CoordinatorSettings, workers: WorkerRegistry
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._workers = workers
        self._lease = CoordinatorLease(
            redis, settings.coordinator_id, settings.coordinator_lease_seconds
        )
        self._fence: int | None = None
        self._active: str = ""
        self._scanned = asyncio.Event()  # an open run would have been found by now
        self._driver: RunDriver | None = None
        self._task: asyncio.Task[None] | None = None
        self.progress: RoundProgress | None = None  # of the active run

    # --- the life of the process --------------------------------------------------------------

    async def run(self) -> None:
        """Take the lease, go on with an open run, hold the lease until cancelled.

        Raises LeaseLostError.
        """
        fence = await self._take_lease()
        try:
            await self._resume_open_run()
            self._scanned.set()
            while True:
                await asyncio.sleep(self._settings.coordinator_lease_seconds / 3)
                if not await self._lease.renew(fence):
                    raise LeaseLostError(
                        f"coordinator {self._settings.coordinator_id} has lost its lease:"
                        " it ran out, or another one has taken over"
                    )
        finally:
            try:
                await self._halt()
            finally:
                await self._lease.release(fence)

    async def _take_lease(self) -> int:
        while (fence := await self._lease.acquire()) is None:
            _log.info("standing by: another coordinator holds the lease")
            await asyncio.sleep(_STANDBY_SECONDS)
        self._fence = fence
        _log.info("coordinating with fence %d", fence)
        return fence

    async def _resume_open_run(self) -> None:
        for run_id in await list_run_ids(self._redis):
            state = await self._readable(run_id)
            if state is None or state.status not in _OPEN or self._active:
                continue
            _log.info("going on with run %s at step %d", run_id, state.step)
            self._active = run_id  # before the next await: a StartRun must see it
            try:
                await self._begin(state)
            except ServiceError as error:
                self._active = ""
                await self._set_failed(run_id, str(error))

    async def _halt(self) -> None:
        """Stop driving; the run stays open and is resumed by the next coordinator."""
        await end_tasks(self._task)

    # --- what the RPCs ask for ----------------------------------------------------------------

    async def start(
        self, run_id: str, values: Mapping[str, Any], *, validate_only: bool
    ) -> RunState:
        """StartRun. Raises InvalidArgumentError, AlreadyExistsError, FailedPreconditionError."""
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError.field(
                "run_id", f"{run_id!r} is not 1 to 64 of a-z, 0-9, - and _; choose such a name"
            )
        settings = _parse(values)
        resolved = settings.model_dump(mode="json")
        if validate_only:
            return await self._new_state(run_id, settings)
        self._require_lease()
        await self._scanned.wait()
        store = RunStore(self._redis, run_id)
        state = await self._load(run_id)
        if state is not None and state.settings != resolved:
            raise AlreadyExistsError(
                "SETTINGS_DIFFER",
                f"run {run_id} exists with other settings"
                f" ({_difference(state.settings, resolved)}); choose another run_id",
            )
        if state is not None and (state.status == "succeeded" or run_id == self._active):
            return state
        self._require_idle()
        self._active = run_id  # before the first await: a second StartRun must see it
        try:
            return await self._create_and_begin(store, settings)
        except BaseException:
            if self._task is None:
                self._active = ""
            raise

    async def stop(self, run_id: str, mode: str) -> RunState:
        """StopRun; mode is after_step, drain or immediately. Raises NotFoundError."""
        state = await self.get(run_id)
        if run_id != self._active or self._driver is None or state.status not in _OPEN:
            return state
        driver = self._driver
        driver.stop_mode = mode
        await RunStore(self._redis, run_id).set_status(
            self._require_lease(), "stopping", stop_mode=mode
        )
        if mode == "immediately":
            await self._stop_at_once(run_id, driver)
        return await self.get(run_id)

    async def _stop_at_once(self, run_id: str, driver: RunDriver) -> None:
        await end_tasks(self._task)
        state = await self.get(run_id)
        if state.status not in _OPEN:  # it came to its end by itself
            return
        try:
            await driver.abandon(state.step)
        except ServiceError as error:
            _log.warning("step %d of run %s is not abandoned: %s", state.step, run_id, error)
        await RunStore(self._redis, run_id).set_status(self._require_lease(), "stopped")

    async def evaluate(self, run_id: str) -> Measurement:
        """RunEvaluation. Raises NotFoundError, FailedPreconditionError."""
        await self.get(run_id)
        if run_id != self._active or self._driver is None:
            raise FailedPreconditionError(
                "RUN_NOT_ACTIVE",
                f"run {run_id} is not being driven; its measurements are in validation.jsonl, and"
                " StartRun with the same settings goes on with one that was stopped",
            )
        return await self._driver.validator.request()

    async def get(self, run_id: str) -> RunState:
        """The committed state of a run. Raises NotFoundError, FailedPreconditionError."""
        state = await self._load(run_id)
        if state is None:
            raise NotFoundError("RUN_NOT_FOUND", f"there is no run {run_id!r}; see ListRuns")
        return state

    async def list(self) -> list[RunState]:
        """All runs that this version can read, newest first."""
        states = [await self._readable(run_id) for run_id in await list_run_ids(self._redis)]
        return [state for state in states if state is not None]

    async def _load(self, run_id: str) -> RunState | None:
        """Raises FailedPreconditionError where another version wrote the state."""
        try:
            return await RunStore(self._redis, run_id).load()
        except LayoutError as error:
            raise FailedPreconditionError("LAYOUT", f"run {run_id}: {error}") from error

    async def _readable(self, run_id: str) -> RunState | None:
        """The state of a run; None where another version wrote it: that run is left alone."""
        try:
            return await self._load(run_id)
        except FailedPreconditionError as error:
            _log.warning("left alone: %s", error)
            return None

    def store(self, run_id: str) -> RunStore:
        """Records and events of a run."""
        return RunStore(self._redis, run_id)

    def directory(self, run_id: str) -> Path:
        """Where a run's outputs are."""
        return (self._settings.run_directory / run_id).resolve()

    @property
    def active_run_id(self) -> str:
        """The run that is being driven here, or ""."""
        return self._active

    @property
    def holds_lease(self) -> bool:
        """Whether this coordinator is the one that drives."""
        return self._fence is not None

    def is_active(self, run_id: str) -> bool:
        """Whether the run is being driven here."""
        return run_id == self._active

    # --- driving ------------------------------------------------------------------------------

    async def _new_state(self, run_id: str, settings: RunSettings) -> RunState:
        """The first state of a run. Reads its data: what is wrong there is found now."""
        data = await asyncio.to_thread(_load_data, settings)
        steps = _planned_steps(settings, len(data.dataset))
        resolved = settings.model_dump(mode="json")
        digest = data.dataset.digest
        return RunState(run_id, resolved, time.time(), planned_steps=steps, data_digest=digest)

    async def _create_and_begin(self, store: RunStore, settings: RunSettings) -> RunState:
        await store.create(await self._new_state(store.run_id, settings))
        await store.set_status(self._require_lease(), "running")
        state = await self.get(store.run_id)
        try:
            await self._begin(state)
        except ServiceError as error:
            await self._set_failed(store.run_id, str(error))
            raise
        return state

    async def _begin(self, state: RunState) -> None:
        settings = _parse(state.settings)
        data = await asyncio.to_thread(_load_data, settings)
        try:
            outputs = RunOutputs(
                self.directory(state.run_id),
                state.run_id,
                settings.tail_batching.mode,
                state.settings,
            )
        except (RunDirectoryError, OSError) as error:
            raise FailedPreconditionError("RUN_DIRECTORY", str(error)) from error
        context = RunContext(
            run_id=state.run_id,
            settings=settings,
            data=data,
            redis=self._redis,
            workers=self._workers,
            outputs=outputs,
            fence=self._require_lease(),
            on_progress=self._set_progress,
        )
        self._active = state.run_id
        self._driver = RunDriver(context)
        self._task = asyncio.create_task(self._drive(self._driver, state.run_id))

    async def _drive(self, driver: RunDriver, run_id: str) -> None:
        store, fence = RunStore(self._redis, run_id), self._require_lease()
        try:
            status = await driver.run()
            await store.set_status(fence, status)
            _log.info("run %s has %s", run_id, status)
        except StaleFenceError:
            _log.error("run %s is driven by another coordinator now", run_id)
        except (ServiceError, RoundFailedError, RedisError, OSError, ValueError) as error:
            if isinstance(error, ServiceError) and error.reason == "STALE_FENCE":
                _log.error("run %s is driven by another coordinator now: %s", run_id, error)
                return
            _log.exception("run %s has failed", run_id)
            await self._set_failed(run_id, str(error))
        except Exception as error:
            _log.exception("run %s has failed", run_id)
            await self._set_failed(run_id, f"a bug, see the coordinator's log: {error!r}")
            raise
        finally:
            driver.validator.refuse_request()
            self._active, self._driver, self._task, self.progress = "", None, None, None

    async def _set_failed(self, run_id: str, reason: str) -> None:
        try:
            await RunStore(self._redis, run_id).set_status(
                self._require_lease(), "failed", failure=reason
            )
        except (RedisError, StaleFenceError) as error:
            _log.error("the failure of run %s cannot be recorded: %s", run_id, error)

    def _set_progress(self, progress: RoundProgress) -> None:
        self.progress = progress

    def _require_lease(self) -> int:
        if self._fence is None:
            raise UnavailableError(
                "STANDBY", "this coordinator stands by: another one holds the lease"
            )
        return self._fence

    def _require_idle(self) -> None:
        if self._active:
            raise FailedPreconditionError(
                "RUN_ACTIVE", f"run {self._active} is active; stop it or wait for its end"
            )


def _parse(values: Mapping[str, Any]) -> RunSettings:
    try:
        return parse_run_settings(values)
    except SettingsError as error:
        raise InvalidArgumentError(
            "INVALID_SETTINGS",
            f"the settings are wrong: {error}",
            violations=[(f"settings.{name}", what) for name, what in error.problems],
        ) from error


def _load_data(settings: RunSettings) -> RunData:
    try:
        return load_run_data(settings)
    except DataError as error:
        raise InvalidArgumentError.field("settings.data", str(error)) from error


def _planned_steps(settings: RunSettings, prompt_count: int) -> int:
    per_step = settings.tail_batching.prompts_per_step
    by_data = -(-prompt_count * settings.data.epochs // per_step)
    return min(by_data, settings.max_steps) if settings.max_steps else by_data


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The names of the settings that differ, dotted."""
    names = _flat(old).items() ^ _flat(new).items()
    return ", ".join(sorted({name for name, _ in names}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = repr(value)
    return flat
