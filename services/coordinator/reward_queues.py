"""The reward queues of a round, one for each kind of grader, and what is measured at them.

    ScoreResponse --put--> RewardQueue --due--> a call --answered--> the next one is due
                               +------- RewardMeter: how many, since when -------+

No I/O. What never happens: time counts in which nothing is asked for, or in which no service could
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rollpacker.policy.commands import ScoreResponse
from rollpacker.policy.reward_meter import RewardMeter, RewardSpeed
from rollpacker.policy.reward_queue import RewardQueue
from rollpacker.types import DrawId, GraderKind


class Graders(Protocol):
    """All reward services together."""

    def room(self, kind: GraderKind) -> int:
        """See `RewardQueue.take`."""
        ...

    def works_on(self, kind: GraderKind) -> int:
        """Responses that are worked on, or on their way, at once; 0: nobody knows."""
        ...

    def is_away(self, kind: GraderKind) -> bool:
        """Whether none could answer now."""
        ...


class RewardQueues:
    """Of one round."""

    def __init__(self, responses_per_prompt: int, has_lost: Callable[[DrawId], bool]) -> None:
        self._responses_per_prompt = responses_per_prompt
        self._has_lost = has_lost
        self._queues: dict[GraderKind, RewardQueue] = {}
        self._meter = RewardMeter()

    @property
    def speeds(self) -> dict[str, RewardSpeed]:
        """What was measured, by kind of grader."""
        return self._meter.speeds

    def put(self, kind: GraderKind, command: ScoreResponse) -> None:
        """A response has finished."""
        self._queue(kind).put(command)

    def let_go(self, kind: GraderKind, draw: DrawId) -> None:
        """A group is sampled no further."""
        self._queue(kind).let_go(draw)

    def answered(self, kind: GraderKind, seconds: float | None) -> None:
        """One that was due has its reward, which took so long by itself; None: it has none."""
        self._queue(kind).answered()
        self._meter.answered(kind.value)
        if seconds is not None:
            self._meter.took(kind.value, seconds)

    def due(self, now: float, graders: Graders) -> list[ScoreResponse]:
        """What to send at `now`, monotonic; to be asked after each event."""
        found: list[ScoreResponse] = []
        for kind, queue in self._queues.items():
            found += queue.take(graders.room(kind), self._has_lost)
            asked = 0 if graders.is_away(kind) else queue.under_way + queue.waiting
            self._meter.looked(now, kind.value, asked, graders.works_on(kind))
        return found

    def _queue(self, kind: GraderKind) -> RewardQueue:
        return self._queues.setdefault(kind, RewardQueue(self._responses_per_prompt))
