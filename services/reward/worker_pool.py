"""The pool of grading workers: so many slots, each with its workers, and one bounded line.

A slot does one task at a time. It has a sealed worker, and an open one from the first task that
needs it (`grading_worker`): model text is never graded where the seal is missing.

A task waits in the line, then runs in a slot; its time limit starts when it runs. What can happen
to it there, and nothing else:

- it gets a score;
- it uses up its time: the worker is killed and replaced, the score is 0 with TIMED_OUT;
- the worker dies by itself: the task runs once more on a fresh worker, then it is lost
  (WorkerLostError), which is no score;
- the reference is unusable or the scorer fails: its error reaches the caller, the worker lives on;
- this host cannot offer the grader (GraderUnavailableError): so it is for every task of its kind.
  A host where workers cannot be sealed offers none of the graders that need it.

A caller that gives up while its task waits takes it out of the line; once it runs it runs to its
end, and the score is dropped. A full line refuses at once (SlotsBusyError) and says when to try
again. After `stop` no process of the pool is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingTask,
    ProgramOutcome,
    ProgramTask,
    Score,
)
from services.reward.graders.registry import graders
from services.reward.worker_process import (
    WALL_FACTOR,
    GradingOutcome,
    TimeLimitError,
    WorkerLostError,
    WorkerProcess,
)

Outcome = TypeVar("Outcome")
GraderSettings = Mapping[GraderKind, Mapping[str, Any]]
WAITING_PER_SLOT = 1024
_ATTEMPTS = 2  # on workers that die by themselves
_FIRST_GRADER = GraderKind.MATH  # loaded before a slot counts as ready
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 5.0
_FIRST_MEAN_SECONDS, _MEAN_WEIGHT = 0.02, 0.05
_log = logging.getLogger(__name__)


class SlotsBusyError(Exception):
    """The line is full; try again after `retry_after_seconds`."""

    def __init__(self, waiting: int, retry_after_seconds: float) -> None:
        super().__init__(f"{waiting} responses wait already")
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class _Job:
    task: GradingTask | ProgramTask
    outcome: asyncio.Future[Any]


class WorkerPool:
    """Use it as an async context manager, or call `start` and `stop`."""

    def __init__(
        self,
        slot_count: int,
        time_limit_seconds: float,
        waiting_per_slot: int = WAITING_PER_SLOT,
        settings: GraderSettings = MappingProxyType({}),
        checked_graders: Sequence[GraderKind] = (),
    ) -> None:
        """`settings`: what a grader's `load` takes. `checked_graders` are loaded at the start."""
        self._slots = [_Slot(time_limit_seconds, settings) for _ in range(slot_count)]
        self._checked_graders = tuple(checked_graders)
        self.unavailable: dict[GraderKind, str] = {}  # graders that this host cannot offer, and why
        self._line: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting_limit = waiting_per_slot * slot_count
        self._mean_seconds = _FIRST_MEAN_SECONDS
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def slot_count(self) -> int:
        return len(self._slots)

    @property
    def busy_slot_count(self) -> int:
        return sum(slot.busy for slot in self._slots)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and a slot is free."""
        return self._line.empty() and self.busy_slot_count < self.slot_count

    @property
    def worker_restart_count(self) -> int:
        return sum(slot.restart_count for slot in self._slots)

    @property
    def worker_pids(self) -> list[int]:
        """The processes of the pool."""
        return [pid for slot in self._slots for pid in slot.worker_pids]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start a sealed worker in every slot, and return when all are ready.

        Raises WorkerLostError.
        """
        try:
            await asyncio.gather(*(self._check(_FIRST_GRADER, slot) for slot in self._slots))
            for kind in self._checked_graders:
                await self._check(kind, self._slots[0])
        except BaseException:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._run(slot)) for slot in self._slots]

    async def _check(self, kind: GraderKind, slot: _Slot) -> None:
        try:
            await slot.ready_worker(kind)
        except GraderUnavailableError as error:
            kinds = [kind]
            if kind is _FIRST_GRADER:  # refused only where no worker can be sealed
                kinds = [sealed for sealed, grader in graders().items() if grader.sealed]
            for missing in set(kinds) - self.unavailable.keys():
                _log.warning("%s is not offered: %s", missing.value, error)
                self.unavailable[missing] = str(error)

    async def stop(self) -> None:
        """Kill every worker; tasks that wait or run are lost. Repeat: no effect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.drop_workers() for slot in self._slots))
        while not self._line.empty():
            _fail(self._line.get_nowait(), WorkerLostError("the reward service stops"))

    def require(self, kind: GraderKind) -> None:
        """Raise GraderUnavailableError for a grader that this host cannot offer."""
        if kind in self.unavailable:
            raise GraderUnavailableError(self.unavailable[kind])

    async def grade(self, task: GradingTask) -> GradingOutcome:
        """Score one response.

        Raises SlotsBusyError, WorkerLostError, BadReferenceError, GraderFailedError,
        GraderUnavailableError.
        """
        outcome: GradingOutcome = await self._in_line(task.grader_kind, task)
        return outcome

    async def run(self, task: ProgramTask) -> ProgramOutcome:
        """Run a program in a sandbox, in the same line and slots.

        Raises SlotsBusyError, WorkerLostError, GraderUnavailableError.
        """
        outcome: ProgramOutcome = await self._in_line(GraderKind.CODE, task)
        return outcome

    async def _in_line(self, kind: GraderKind, task: GradingTask | ProgramTask) -> Any:
        self.require(kind)
        waiting = self._line.qsize()
        if waiting >= self._waiting_limit:
            seconds = waiting * self._mean_seconds / self.slot_count
            raise SlotsBusyError(
                waiting, min(max(seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
            )
        job = _Job(task, asyncio.get_running_loop().create_future())
        self._line.put_nowait(job)
        return await job.outcome

    async def _run(self, slot: _Slot) -> None:
        """The life of one slot."""
        while True:
            # Tried again for the next task.
            with contextlib.suppress(WorkerLostError, GraderUnavailableError):
                await slot.ready_worker(_FIRST_GRADER)
            job = await self._line.get()
            if not job.outcome.done():  # else the caller gave up
                await self._work(slot, job)

    async def _work(self, slot: _Slot, job: _Job) -> None:
        try:
            outcome = await slot.work(job.task)
        except (
            WorkerLostError,
            BadReferenceError,
            GraderFailedError,
            GraderUnavailableError,
        ) as error:
            _fail(job, error)
        except asyncio.CancelledError:
            _fail(job, WorkerLostError("the reward service stops"))
            raise
        else:
            self._mean_seconds += _MEAN_WEIGHT * (_seconds(outcome) - self._mean_seconds)
            if not job.outcome.done():
                job.outcome.set_result(outcome)


class _Slot:
    """One place to grade: its workers, and how often one had to be replaced."""

    def __init__(self, time_limit_seconds: float, settings: GraderSettings) -> None:
        self._settings = settings
        self._time_limit_seconds = time_limit_seconds
        self._workers: dict[bool, WorkerProcess] = {}  # by whether it is sealed
        self.busy = False
        self.restart_count = 0
        self._started: set[bool] = set()

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    async def ready_worker(self, kind: GraderKind) -> WorkerProcess:
        """The worker, started if need be, with a grader loaded.

        Raises WorkerLostError, GraderUnavailableError.
        """
        sealed = graders()[kind].sealed
        worker = self._workers.get(sealed)
        if worker and not worker.alive:
            _log.warning("grading worker %d died while idle", worker.pid)
            await self._drop_worker(sealed)
            worker = None
        if worker is None:
            self.restart_count += sealed in self._started
            self._started.add(sealed)
            worker = self._workers[sealed] = await WorkerProcess.start(sealed)
        await worker.load(kind, self._settings.get(kind, {}))
        return worker

    async def drop_workers(self) -> None:
        """Kill the workers. Repeat: no effect."""
        for sealed in tuple(self._workers):
            await self._drop_worker(sealed)

    async def _drop_worker(self, sealed: bool) -> None:
        if worker := self._workers.pop(sealed, None):
            await worker.kill()

    async def work(self, task: GradingTask | ProgramTask) -> GradingOutcome | ProgramOutcome:
        """See the module for what can happen."""
        self.busy = True
        try:
            if isinstance(task, ProgramTask):
                return await self._on_worker(GraderKind.CODE, lambda worker: worker.run(task))
            return await self._grade(task)
        finally:
            self.busy = False

    async def _grade(self, task: GradingTask) -> GradingOutcome:
        grader = graders()[task.grader_kind]
        limit = math.inf if grader.keeps_own_limits else self._time_limit_seconds
        try:
            return await self._on_worker(task.grader_kind, lambda worker: worker.grade(task, limit))
        except TimeLimitError:
            await self._drop_worker(grader.sealed)
            if grader.late_is_verdict:
                return GradingOutcome(Score(0.0, Verdict.TIMED_OUT), self._time_limit_seconds)
            raise GraderFailedError(
                f"grader {task.grader_kind.value} took more than {limit:g} s of CPU time"
                f" or {WALL_FACTOR * limit:g} s; reference {task.reference_json:.100},"
                f" response {task.response_text!r:.100}"
            ) from None

    async def _on_worker(
        self, kind: GraderKind, use: Callable[[WorkerProcess], Awaitable[Outcome]]
    ) -> Outcome:
        """Once more on a fresh worker, if the first dies by itself. Raises WorkerLostError."""
        attempt = 1
        while True:
            try:
                return await use(await self.ready_worker(kind))
            except WorkerLostError as error:
                _log.warning("%s", error)
                await self._drop_worker(graders()[kind].sealed)
                if attempt == _ATTEMPTS:
                    raise
                attempt += 1


def _seconds(outcome: GradingOutcome | ProgramOutcome) -> float:
    if isinstance(outcome, ProgramOutcome):
        return outcome.wall_seconds
    return outcome.elapsed_seconds


def _fail(job: _Job, error: Exception) -> None:
    if not job.outcome.done():
        job.outcome.set_exception(error)
