"""The runs of a coordinator: at most one is driven at a time, under the lease.

    (no run) --StartRun--> running --run ended--> succeeded | stopped | failed
       |                    ^   ^
       +--queue--> queued --+   +- restart: a coordinator that comes back goes on with the run that
                                   it finds open (running, pausing, paused or stopping)

Should it find more than one open, it drives the oldest that is not paused, or else the oldest. Of
the others one that runs is queued, one that is stopping has stopped, and a paused one stays paused:
StartRun goes on with it. So does a paused run whose files cannot be read at the restart.

`Runs` owns the queue, the driver's task and the live progress; the lease is in `leadership.py`, how
a run ends in `driven_run.py`, what people ask of a run that is under way in `operations.py`. A run
that is open is the active one, also while it is paused; when it has ended, the next of the queue
starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from rollpacker.devices.store import DeviceLeases
from rollpacker.rpc.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ServiceError,
)
from rollpacker.rpc.waiting import told_while_waiting
from rollpacker.store.records import LayoutError, RunState
from rollpacker.store.run_queue import RunQueue
from rollpacker.store.run_store import RunStore, list_run_ids
from rollpacker.tasks import end_tasks
from services.coordinator.control import RunControl
from services.coordinator.driven_run import ActiveRun, drive, run_context, set_failed
from services.coordinator.driver import RunDriver
from services.coordinator.leadership import Leadership
from services.coordinator.progress import RoundProgress
from services.coordinator.run_values import difference, in_force, load_data, new_state, parse
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.workers import WorkerRegistry

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
OPEN = ("running", "pausing", "paused", "stopping")
_FAILS = ("running", "pausing", "stopping")  # where it cannot be driven; a paused one stays paused
_MAY_WAIT = ("queued", "paused", "stopped", "failed")  # not driven, so it may wait for its turn
_log = logging.getLogger(__name__)


class Runs:
    """See the top of the file."""

    def __init__(
        self, redis: Redis, settings: CoordinatorSettings, workers: WorkerRegistry
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._workers = workers
        self._leadership = Leadership(redis, settings)
        self._queue = RunQueue(redis)
        self.devices = DeviceLeases(redis, settings.device_lease_seconds)
        self._active: ActiveRun | None = None
        self._scanned = asyncio.Event()  # an open run would have been found by now
        self._wake = asyncio.Event()  # a run has ended, or waits for its turn
        self.progress: RoundProgress | None = None  # of the active run

    # --- the life of the process --------------------------------------------------------------

    async def run(self) -> None:
        """Take the lease, go on with an open run, hold the lease until cancelled.

        Raises LeaseLostError.
        """
        await self._leadership.take()
        tasks = [asyncio.create_task(self._leadership.hold()), asyncio.create_task(self._serve())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            try:
                await end_tasks(*tasks, self._active.task if self._active else None)
            finally:
                await self._leadership.release()

    async def _serve(self) -> None:
        """Go on with the run that is open; then, whenever none is, with the next of the queue."""
        oldest_first = reversed(await self.list())
        for state in sorted(oldest_first, key=lambda state: state.status == "paused"):
            await self._take_up(state)
        self._scanned.set()
        while True:
            self._wake.clear()
            first = await self._queue.first() if self._active is None else None
            if first is None:
                await self._wake.wait()
            else:
                await self._start_queued(first)

    async def _take_up(self, state: RunState) -> None:
        """One run of those that a start finds; the first that is open is gone on with."""
        run_id = state.run_id
        if state.status in OPEN and self._active is None:
            _log.info("going on with run %s at step %d", run_id, state.step)
            await self._begin_or_fail(ActiveRun(run_id))
        elif state.status == "stopping":  # nobody drives it, so it has stopped
            await self.store(run_id).set_status(self.fence(), "stopped")
        elif state.status in ("running", "pausing", "queued"):
            await self._queue_up(run_id, state.pause_at, only_from=(state.status,))

    async def _queue_up(
        self, run_id: str, pause_at: int | None, *, only_from: Sequence[str]
    ) -> None:
        """The status comes first: an entry of the queue that is not queued is taken out."""
        if await self.store(run_id).set_status(
            self.fence(), "queued", pause_at=pause_at, only_from=only_from
        ):
            await self._queue.add(run_id)

    async def _start_queued(self, run_id: str) -> None:
        if self._active is not None:
            return  # StartRun was faster
        self._active = active = ActiveRun(run_id)
        store, fence = RunStore(self._redis, run_id), self.fence()
        waiting = await self._readable(run_id)
        pause_at = waiting.pause_at if waiting else None
        if await store.set_status(fence, "running", pause_at=pause_at, only_from=("queued",)):
            _log.info("it is the turn of run %s", run_id)
            await store.reopen_step(fence)
            await self._begin_or_fail(active)
        else:
            self._active = None
        await self._queue.remove(run_id)

    async def _begin_or_fail(self, active: ActiveRun) -> None:
        self._active, run_id = active, active.run_id  # before the first await: StartRun must see it
        try:
            await self._begin(active)
        except ServiceError as error:
            _log.error("run %s cannot be driven: %s", run_id, error)
            await set_failed(self.store(run_id), self.fence(), str(error), only_from=_FAILS)
            self._active = None

    # --- what the RPCs ask for ----------------------------------------------------------------

    async def start(
        self,
        run_id: str,
        values: Mapping[str, Any],
        *,
        validate_only: bool,
        queue: bool = False,
        until_step: int = 0,
    ) -> RunState:
        """StartRun. Raises InvalidArgumentError, AlreadyExistsError, FailedPreconditionError."""
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError.field(
                "run_id", f"{run_id!r} is not 1 to 64 of a-z, 0-9, - and _; choose such a name"
            )
        if until_step < 0:
            raise InvalidArgumentError.field("until_step", f"{until_step} is below 0")
        settings, pause_at = parse(values), until_step or None
        if validate_only:
            return await new_state(run_id, settings, self._workers)
        self.fence()
        async with told_while_waiting("the data of the run that is open"):
            await self._scanned.wait()
        store = RunStore(self._redis, run_id)
        state = await self._load(run_id)
        if state is not None:
            # A setting that is newer than the run has its default there.
            present, asked = in_force(parse(state.settings)), in_force(settings)
            if present != asked:
                raise AlreadyExistsError(
                    "SETTINGS_DIFFER",
                    f"run {run_id} exists with other settings"
                    f" ({difference(present, asked)}); choose another run_id",
                )
        if state is not None and (state.status == "succeeded" or self.is_active(run_id)):
            return state
        if state is not None and await self._queue.position(run_id):
            return state
        # The cap of a run that is there may have been updated since.
        first = partial(new_state, run_id, settings, self._workers if state is None else None)
        if self._active is not None and queue:
            return await self._enqueue(store, first, pause_at)
        self._require_idle()
        self._active = active = ActiveRun(run_id)  # before the first await, as above
        try:
            return await self._create_and_begin(active, first, pause_at)
        except BaseException:
            if self._active is active and active.task is None:
                self._active = None
            raise

    async def _enqueue(
        self, store: RunStore, first: Callable[[], Awaitable[RunState]], pause_at: int | None
    ) -> RunState:
        state = await first()
        await store.create(dataclasses.replace(state, status="queued", pause_at=pause_at))
        await self._queue_up(store.run_id, pause_at, only_from=_MAY_WAIT)
        self._wake.set()
        return await self.get(store.run_id)

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
        return self._active.run_id if self._active else ""

    @property
    def holds_lease(self) -> bool:
        """Whether this coordinator is the one that drives."""
        return self._leadership.is_held

    @property
    def is_starting(self) -> bool:
        """Whether a coordinator that has just started still looks for open runs."""
        return not self._scanned.is_set()

    def is_active(self, run_id: str) -> bool:
        """Whether the run is being driven here."""
        return self.active(run_id) is not None

    def active(self, run_id: str) -> ActiveRun | None:
        """The run, if it is being driven here."""
        return self._active if self._active and self._active.run_id == run_id else None

    async def queue_position(self, run_id: str) -> int:
        """Of a run that waits, from 1."""
        return await self._queue.position(run_id)

    async def leave_queue(self, run_id: str) -> bool:
        """Whether the run was waiting; it is stopped now."""
        store = RunStore(self._redis, run_id)
        left = await store.set_status(self.fence(), "stopped", only_from=("queued",))
        await self._queue.remove(run_id)
        return left

    def fence(self) -> int:
        """Of the lease. Raises UnavailableError (STANDBY)."""
        return self._leadership.fence()

    # --- driving ------------------------------------------------------------------------------

    async def _create_and_begin(
        self, active: ActiveRun, first: Callable[[], Awaitable[RunState]], pause_at: int | None
    ) -> RunState:
        state, store = await first(), self.store(active.run_id)
        await store.create(dataclasses.replace(state, pause_at=pause_at))
        await store.reopen_step(self.fence())
        await store.set_status(self.fence(), "running", pause_at=pause_at)
        try:
            await self._begin(active)
        except ServiceError as error:
            await set_failed(store, self.fence(), str(error))
            raise
        return await self.get(store.run_id)

    async def _begin(self, active: ActiveRun) -> None:
        run_id = active.run_id
        settings = parse((await self.get(run_id)).settings)
        data = await asyncio.to_thread(load_data, settings)
        async with active.lock:
            state = await self.get(run_id)  # it may be paused or stopped by now
            context = run_context(
                state,
                settings,
                data,
                self._redis,
                self._workers,
                self.directory(run_id),
                self.fence(),
                self._set_progress,
            )
            control = RunControl(state, active.lock)
            driver = RunDriver(context, control)
            task = asyncio.create_task(self._drive(driver, control, run_id))
            self._active = dataclasses.replace(active, driver=driver, control=control, task=task)

    async def _drive(self, driver: RunDriver, control: RunControl, run_id: str) -> None:
        try:
            await drive(driver, self.store(run_id), self.fence())
        finally:
            driver.validator.refuse_request()
            self._active, self.progress = None, None
            control.end()
            self._wake.set()

    def _set_progress(self, progress: RoundProgress) -> None:
        self.progress = progress

    def _require_idle(self) -> None:
        if self._active:
            raise FailedPreconditionError(
                "RUN_ACTIVE",
                f"run {self._active.run_id} is active; stop it, wait for its end, or let this one"
                " wait for its turn (`queue`)",
            )
