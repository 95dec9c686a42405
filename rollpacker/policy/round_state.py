"""The groups and replicas of a round: what `rollpacker.policy.round` keeps of each."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.policy.advantages import AdvantageRules, group_advantages
from rollpacker.policy.scale_down import ReplicaLoad, RunningResponse
from rollpacker.types import Draw, DrawId


class GroupState(enum.Enum):
    """See the top of `rollpacker/policy/round.py`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    COMPLETE = "complete"
    WON = "won"
    EMITTED = "emitted"
    LOST = "lost"
    FLAT = "flat"


@dataclass(slots=True)
class Group:
    """One draw in the round."""

    draw: Draw
    response_count: int
    expected_tokens: int  # KV tokens that one response needs, prompt included
    state: GroupState = GroupState.WAITING
    replica_id: str = ""
    finished: dict[int, int] = field(default_factory=dict)  # index -> tokens, in order of arrival
    rewards: dict[int, float | None] = field(default_factory=dict)
    longest_tokens: int = 0
    running_tokens: int = 0  # of the responses of this launch that have not finished
    launch_finished_tokens: int = 0  # of those that have
    # Decoded tokens; carried ones (a moved prefix, an accepted draft) are not among them.
    finished_decoded: int = 0  # of responses that have finished
    launch_finished_decoded: int = 0  # of these, in this launch
    running_decoded: int = 0  # of those that have not
    aborted_decoded: int = 0  # of launches that were lost
    cut_tokens: tuple[int, ...] = ()  # of responses that were let go when enough had finished

    @property
    def decoded(self) -> int:
        return self.finished_decoded + self.running_decoded + self.aborted_decoded

    def begin_launch(self, replica_id: str) -> None:
        """Its missing responses run on a replica."""
        self.state, self.replica_id = GroupState.RUNNING, replica_id
        self.launch_finished_tokens = self.launch_finished_decoded = 0

    def progress(self, longest: int, total: int, carried: int) -> None:
        """How far this launch is: its longest response, and all of them together; in tokens."""
        self.longest_tokens = max(self.longest_tokens, longest)
        self.running_tokens = max(0, total - self.launch_finished_tokens)
        self.running_decoded = max(0, total - carried - self.launch_finished_decoded)

    def finish(self, index: int, tokens: int, carried: int) -> None:
        """A response has ended."""
        decoded = tokens - carried
        self.finished[index] = tokens
        self.launch_finished_tokens += tokens
        self.running_tokens = max(0, self.running_tokens - tokens)
        self.finished_decoded += decoded
        self.launch_finished_decoded += decoded
        self.running_decoded = max(0, self.running_decoded - decoded)
        self.longest_tokens = max(self.longest_tokens, tokens)

    def restore(self, response_tokens: Sequence[int], carried: int) -> None:
        """It was complete and emitted before a crash."""
        self.finished = dict(enumerate(response_tokens))
        self.finished_decoded = sum(response_tokens) - carried
        self.longest_tokens = max(response_tokens, default=0)
        self.rewards = dict.fromkeys(self.finished)

    def end_launch(self) -> None:
        """What it was decoding has stopped."""
        self.aborted_decoded += self.running_decoded
        self.running_tokens = self.running_decoded = 0

    def cut(self) -> None:
        """Enough responses have finished; the others are let go."""
        self.cut_tokens = (self.tokens_so_far(),) * len(self.missing())

    def tokens_so_far(self) -> int:
        """Of each unfinished response, by the newest report: they run in step, so all have the
        mean; 0 when there is none."""
        return self.running_tokens // max(1, len(self.missing()))

    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.response_count) if i not in self.finished)

    def is_scored(self) -> bool:
        """Whether every response that has finished has its reward, or none."""
        return self.finished.keys() <= self.rewards.keys()

    def advantages(self, rules: AdvantageRules) -> tuple[float, ...]:
        """By response, in the order of their indices; all are scored."""
        indices = sorted(self.finished)
        rewards = [self.rewards[index] for index in indices]
        return tuple(group_advantages(rules, rewards, [self.finished[i] for i in indices]))

    def is_flat(self, rules: AdvantageRules) -> bool:
        """Whether rewards were given and teach nothing; all responses are scored."""
        given = [index for index in self.finished if self.rewards[index] is not None]
        return len(given) >= 2 and not any(self.advantages(rules))

    def outstanding_tokens(self) -> int:
        """KV tokens that its open responses are expected to need."""
        each = max(self.expected_tokens, self.longest_tokens)
        return each * (self.response_count - len(self.finished))


@dataclass(slots=True)
class Replica:
    """One replica that serves the round's weights."""

    capacity: int  # responses at a time
    kv_budget_tokens: int  # 0: no limit
    used: int = 0
    draining: bool = False  # takes no more groups
    turns: int = 0  # groups that it was given
    running: set[DrawId] = field(default_factory=set)

    def room(self) -> int:
        return self.capacity - self.used

    def load(
        self, name: str, groups: Mapping[DrawId, Group], prompt_tokens: Mapping[DrawId, int]
    ) -> ReplicaLoad:
        """Its running responses."""
        running = [
            RunningResponse(prompt_tokens[draw], groups[draw].tokens_so_far())
            for draw in self.running
            for _ in groups[draw].missing()
        ]
        return ReplicaLoad(name, self.kv_budget_tokens, tuple(running))
