"""How the finished responses of one round come to the reward model.

    ScoreResponse, AbortGroup --> Scoring --> ResponseScored, with the time at which it is known

As they finish; or, where the schedule says so, through the queue that a live run has
(`policy.reward_queue`), one for each task: the model has a dispatcher, sandbox slots and a judge.
In a round that does not stream, all at once, one grader after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollpacker.policy.commands import AbortGroup, Command, ScoreResponse
from rollpacker.policy.events import ResponseScored
from rollpacker.policy.reward_meter import RewardMeter
from rollpacker.policy.reward_queue import RewardQueue
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.simulation.reward_model import RewardModel
from rollpacker.types import DrawId


class Scorable(Protocol):
    """What has to be known of a draw."""

    @property
    def task(self) -> str: ...

    def to_score(self, index: int) -> tuple[int, str, bool]:
        """A response as the reward model takes it: (prompt, task, whether it was cut off)."""


@dataclass(slots=True)
class Scoring:
    """See the top of the file. Use once."""

    reward: RewardModel | None  # None: rewards take no time
    draws: Mapping[DrawId, Scorable]
    streams: bool
    tasks: Sequence[str]
    queues: dict[str, RewardQueue]  # by task; empty: there are none
    meter: RewardMeter = field(default_factory=RewardMeter)
    under_way: Counter[str] = field(default_factory=Counter)  # by task
    answered_tasks: set[str] = field(default_factory=set)  # since commands were handled

    @classmethod
    def of_round(
        cls,
        reward: RewardModel | None,
        draws: Mapping[DrawId, Scorable],
        rules: TailBatchingRules,
        *,
        complete_first: bool,
    ) -> Scoring:
        """`complete_first`: responses of complete groups go before others."""
        tasks = sorted({known.task for known in draws.values()})
        queued = tasks if complete_first and reward and rules.streams else ()
        queues = {task: RewardQueue(rules.responses_per_prompt) for task in queued}
        return cls(reward, draws, rules.streams, tasks, queues)

    def handled(
        self, now: float, commands: Sequence[Command], has_lost: Callable[[DrawId], bool]
    ) -> list[ResponseScored]:
        """The scores that these commands begin."""
        asked: list[ScoreResponse] = []
        changed, self.answered_tasks = self.answered_tasks, set()
        for command in commands:
            if isinstance(command, ScoreResponse):
                task = self.draws[command.draw].task
                changed.add(task)
                if self.queues:
                    self.queues[task].put(command)
                else:
                    asked.append(command)
            elif self.queues and isinstance(command, AbortGroup):
                task = self.draws[command.draw].task
                changed.add(task)
                self.queues[task].let_go(command.draw)
        tasks = [task for task in self.tasks if task in changed] if changed else ()
        if self.queues:
            assert self.reward is not None
            for task in tasks:
                asked += self.queues[task].take(self.reward.room(task), has_lost)
        for command in asked:
            self.under_way[self.draws[command.draw].task] += 1
        if self.reward is not None:
            for task in tasks:
                waiting = self.queues[task].waiting if self.queues else 0
                self.meter.looked(now, task, self.under_way[task] + waiting, self.reward.room(task))
        return self._scored(now, asked) if asked else []

    def answered(self, event: ResponseScored) -> None:
        """A score is known: there is room for another response."""
        task = self.draws[event.draw].task
        self.under_way[task] -= 1
        self.answered_tasks.add(task)
        self.meter.answered(task)
        if self.queues:
            self.queues[task].answered()

    def _scored(self, now: float, commands: Sequence[ScoreResponse]) -> list[ResponseScored]:
        if self.reward is None:
            return [ResponseScored(now, c.draw, c.index, 1.0) for c in commands]
        items = [self.draws[command.draw].to_score(command.index) for command in commands]
        if self.streams:
            scores = [self.reward.score(now, n, task, is_cut=cut) for n, task, cut in items]
        else:
            scores = self.reward.score_in_turn(now, items)
        for (_, task, _), score in zip(items, scores, strict=True):
            self.meter.took(task, score.seconds)
        return [
            ResponseScored(score.at, command.draw, command.index, score.reward)
            for command, score in zip(commands, scores, strict=True)
        ]
