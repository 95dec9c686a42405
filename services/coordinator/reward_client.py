"""Scoring a response: which reward service, how often, and when to give up.

A reward service that is away or busy is waited for; that costs time, never a reward. Only a
service that keeps answering with a failure ends in "no reward" (None), which group statistics
leave out. A wrong answer is a verdict and no failure at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass

from rollpacker import wire
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from rollpacker.settings import RewardSettings
from rollpacker.types import GraderKind, Prompt, Verdict
from rollpacker.v1 import coordinator_service_pb2, reward_service_pb2, reward_service_pb2_grpc
from services.coordinator.workers import WorkerRegistry

_BACKOFF_SECONDS = 0.2
# Responses that may be with the services: so that a slot that is done finds the next one; of what
# is mostly graded at once, without a slot, as many as hide the way there and back.
_PER_SLOT = 2
_AT_ONCE = {GraderKind.MATH: 64}
_TRIES_APART = 2.0  # deadlines of a try: failures that are further apart are two absences
_SLOWEST_CHARACTERS_PER_SECOND = 400.0  # of a judge that reads a response
_WORKER_LOST = "WORKER_LOST"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one response."""

    reward: float | None  # None: the service gave up
    verdict: Verdict | None
    start_time: float  # seconds since the Unix epoch
    end_time: float
    work_seconds: float = 0.0  # of it, without a wait for a grader


class RewardClient:
    """Scores responses on whichever reward service is least busy."""

    def __init__(self, workers: WorkerRegistry, settings: RewardSettings, run_id: str) -> None:
        self._workers = workers
        self._settings = settings
        self._run_id = run_id
        self._away: tuple[float, float] | None = None  # first and newest failure since an answer
        self._unreachable: set[GraderKind] = set()  # until one is answered

    def room(self, kind: GraderKind) -> int:
        """Responses to a kind of prompt that may be with the services at once; 0: nobody knows what
        they can do."""
        return self._settings.max_concurrent_responses or self._told(kind)

    def works_on(self, kind: GraderKind) -> int:
        """How many of these the services do not leave waiting; 0: nobody knows."""
        known = (self._settings.max_concurrent_responses, self._told(kind))
        return min((count for count in known if count), default=0)

    def is_away(self, kind: GraderKind) -> bool:
        """Whether no service could score a response to such a prompt now, as far as is known."""
        return kind in self._unreachable or not self._workers.alive(
            coordinator_service_pb2.WORKER_KIND_REWARD
        )

    async def score(self, response_id: str, text: str, prompt: Prompt) -> Score:
        """Score one response. Raises InvalidArgumentError: the reference itself is unusable."""
        request = reward_service_pb2.ScoreResponseRequest(
            run_id=self._run_id,
            response_id=response_id,
            response_text=text,
            grader_kind=wire.grader_kind_to_proto(prompt.grader_kind),
            reference_json=prompt.reference_json,
            prompt_text=prompt.text,
            prompt_id=prompt.prompt_id,
        )
        start = time.time()
        failures, asked_at = 0, time.monotonic()
        while True:
            try:
                answer = await self._attempt(request)
            except InvalidArgumentError:
                raise
            except (UnavailableError, ResourceExhaustedError) as error:
                lost = error.reason == _WORKER_LOST  # the response may be what kills it
                failures += lost
                if isinstance(error, UnavailableError) and not lost:
                    self._unreachable.add(prompt.grader_kind)
                self._note_failure()
                pause = error.retry_after_seconds or _BACKOFF_SECONDS
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            except ServiceError as error:
                failures += 1
                self._note_failure()
                _log.warning("scoring %s failed (%d): %s", response_id, failures, error)
                await asyncio.sleep(_BACKOFF_SECONDS * 2**failures)
            else:
                self._away = None
                self._unreachable.discard(prompt.grader_kind)
                reward = answer.reward if answer.HasField("reward") else None
                verdict = wire.verdict_from_proto(answer.verdict)
                work_seconds = answer.elapsed.ToTimedelta().total_seconds()
                return Score(reward, verdict, start, time.time(), work_seconds)
            if failures >= self._settings.attempts or self._gives_up(asked_at):
                break
        _log.error("no reward for %s: the reward service gave up on it", response_id)
        return Score(None, None, start, time.time())

    def _note_failure(self) -> None:
        """One more, or the first one: of an older one nobody knows what came after it."""
        now = time.monotonic()
        first, newest = self._away or (now, now)
        is_one = now - newest <= _TRIES_APART * self._settings.timeout_seconds
        self._away = (first if is_one else now, now)

    def _gives_up(self, asked_at: float) -> bool:
        """Whether this response, or all of them, have waited for too long: those that are sent
        later need not wait as long once more."""
        since = min(asked_at, self._away[0]) if self._away else asked_at
        return time.monotonic() - since >= self._settings.unavailable_seconds

    def _told(self, kind: GraderKind) -> int:
        """Room by the slots that the services tell; 0: one does not."""
        slots = self._workers.reward_slots()
        return 0 if slots is None else max(1, _PER_SLOT * slots, _AT_ONCE.get(kind, 0))

    async def _attempt(
        self, request: reward_service_pb2.ScoreResponseRequest
    ) -> reward_service_pb2.ScoreResponseResponse:
        worker = await self._workers.least_busy(coordinator_service_pb2.WORKER_KIND_REWARD)
        stub = reward_service_pb2_grpc.RewardServiceStub(worker.channel)
        reading = len(request.response_text) / _SLOWEST_CHARACTERS_PER_SECOND
        under_way = stub.ScoreResponse(request, timeout=self._settings.timeout_seconds + reading)
        worker.calls.add(under_way)
        try:
            answer: reward_service_pb2.ScoreResponseResponse = await call(lambda: under_way)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not worker.has_moved or (task and task.cancelling()):
                raise
            raise UnavailableError("WORKER_MOVED", f"{worker.worker_id} has moved") from None
        finally:
            worker.calls.discard(under_way)
        if answer.HasField("reward") and not math.isfinite(answer.reward):
            raise InternalError("REWARD_NOT_FINITE", f"the reward is {answer.reward}")
        return answer
