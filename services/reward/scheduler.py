"""The reward scheduler: time limits that follow what correct solutions need.

A program that never ends is the commonest wrong one, and a fixed limit makes each cost the limit.
So every test case has its own: min(max(T_min, lambda * T_anchor), T_max), T_anchor the largest CPU
time of a correct run of it so far (`rollpacker.policy.timeouts`; the grader applies it). Here the
anchors are fetched before a response is graded and raised after it.

An anchor may be too low: then a right but slower program is killed, a *false kill*. So a share of
the killed runs is run again with T_max, when nothing else waits. If such a run is right it was a
false kill: counted, and its CPU time becomes the anchor, so that it does not happen again.

Anchors live in Redis, over restarts and for all replicas. Without Redis, or while it is away, this
replica's own memory serves, and nothing waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from redis.exceptions import RedisError

from rollpacker.policy.timeouts import TimeoutRules
from rollpacker.tasks import end_tasks
from rollpacker.types import GraderKind, Verdict
from services.reward import grading
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingTask,
    Score,
    TestRun,
)
from services.reward.worker_pool import SlotsBusyError, WorkerPool
from services.reward.worker_process import GradingOutcome, WorkerLostError

_MOST_PROMPTS_IN_MEMORY = 100_000
_MOST_RECHECKS_WAITING = 64
_IDLE_CHECK_SECONDS = 0.2
_REDIS_PAUSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class TimeoutAnchors(Protocol):
    """Where anchors are kept."""

    async def get(self, run_id: str, prompt_id: str) -> dict[str, float]: ...

    async def raise_to(self, run_id: str, prompt_id: str, seconds: Mapping[str, float]) -> None: ...


class MemoryTimeoutAnchors:
    """Anchors of this process; the prompts not used for longest are forgotten."""

    def __init__(self) -> None:
        self._anchors: OrderedDict[tuple[str, str], dict[str, float]] = OrderedDict()

    async def get(self, run_id: str, prompt_id: str) -> dict[str, float]:
        return dict(self._anchors.get((run_id, prompt_id), {}))

    async def raise_to(self, run_id: str, prompt_id: str, seconds: Mapping[str, float]) -> None:
        anchors = self._anchors.setdefault((run_id, prompt_id), {})
        self._anchors.move_to_end((run_id, prompt_id))
        for case, value in seconds.items():
            anchors[case] = max(value, anchors.get(case, 0.0))
        if len(self._anchors) > _MOST_PROMPTS_IN_MEMORY:
            self._anchors.popitem(last=False)


@dataclass
class KillCounts:
    """What time limits have cost, since the start."""

    killed: int = 0  # runs over their limit
    rechecked: int = 0  # of those, run again with T_max
    false_kills: int = 0  # of those, right


@dataclass(frozen=True, slots=True)
class _Recheck:
    run_id: str
    prompt_id: str
    task: GradingTask


class RewardScheduler:
    """Grades through a pool that it does not own. Use it as an async context manager."""

    def __init__(
        self,
        pool: WorkerPool,
        rules: TimeoutRules,
        recheck_share: float,
        shared_anchors: TimeoutAnchors | None = None,
    ) -> None:
        self.counts = KillCounts()
        self._pool, self._rules, self._recheck_share = pool, rules, recheck_share
        self._shared = shared_anchors
        self._own = MemoryTimeoutAnchors()
        self._shared_from = 0.0  # time.monotonic() from which Redis may be asked again
        self._rechecks: asyncio.Queue[_Recheck] = asyncio.Queue(_MOST_RECHECKS_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._recheck_when_idle())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task
        await end_tasks(self._task)

    async def grade(self, run_id: str, prompt_id: str, task: GradingTask) -> GradingOutcome:
        """Score one response. Raises what `grading.grade` and `WorkerPool.grade` raise."""
        if task.grader_kind is not GraderKind.CODE:
            return await grading.grade(self._pool, task)
        prompt_id = prompt_id or _digest(task.reference_json)
        anchors = await self._anchors(run_id, prompt_id)
        outcome = await grading.grade(self._pool, replace(task, time_anchors=anchors))
        await self._learn(run_id, prompt_id, anchors, outcome.score)
        for run in outcome.score.runs:
            if run.verdict is Verdict.TIMED_OUT:
                self._note_kill(_Recheck(run_id, prompt_id, task), run)
        return outcome

    async def _anchors(self, run_id: str, prompt_id: str) -> dict[str, float]:
        anchors = await self._own.get(run_id, prompt_id)
        if self._shared and time.monotonic() >= self._shared_from:
            try:
                anchors |= await self._shared.get(run_id, prompt_id)
            except RedisError as error:
                self._leave_redis_alone(error)
        return anchors

    async def _learn(
        self, run_id: str, prompt_id: str, known: Mapping[str, float], score: Score
    ) -> None:
        """Raise the anchors of the cases that ran right and longer than any before."""
        higher = {
            run.name: run.cpu_seconds
            for run in score.runs
            if run.verdict is Verdict.CORRECT and run.cpu_seconds > known.get(run.name, 0.0)
        }
        if not higher:
            return
        await self._own.raise_to(run_id, prompt_id, higher)
        if self._shared and time.monotonic() >= self._shared_from:
            try:
                await self._shared.raise_to(run_id, prompt_id, higher)
            except RedisError as error:
                self._leave_redis_alone(error)

    def _leave_redis_alone(self, error: RedisError) -> None:
        """For a while; meanwhile no response waits for it."""
        _log.warning("time limits use this replica's memory, as Redis fails: %s", error)
        self._shared_from = time.monotonic() + _REDIS_PAUSE_SECONDS

    def _note_kill(self, recheck: _Recheck, run: TestRun) -> None:
        self.counts.killed += 1
        adapted = run.limit_seconds < self._rules.max_seconds
        if adapted and random.random() < self._recheck_share and not self._rechecks.full():
            task = replace(recheck.task, only_case=run.name, time_anchors={})
            self._rechecks.put_nowait(replace(recheck, task=task))

    async def _recheck_when_idle(self) -> None:
        while True:
            recheck = await self._rechecks.get()
            while not self._pool.is_idle:  # noqa: ASYNC110  seldom asked, and nobody waits
                await asyncio.sleep(_IDLE_CHECK_SECONDS)
            try:
                outcome = await self._pool.grade(recheck.task)
            except (
                SlotsBusyError,
                WorkerLostError,
                BadReferenceError,
                GraderFailedError,
                GraderUnavailableError,
            ) as error:
                _log.warning("a killed run could not be checked: %s", error)
                continue
            self.counts.rechecked += 1
            if outcome.score.verdict is Verdict.CORRECT:
                self.counts.false_kills += 1
                await self._learn(recheck.run_id, recheck.prompt_id, {}, outcome.score)


def _digest(reference_json: str) -> str:
    return "reference-" + hashlib.blake2b(reference_json.encode(), digest_size=16).hexdigest()
