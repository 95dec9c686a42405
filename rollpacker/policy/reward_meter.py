"""How fast rewards come, by kind of grader, from one round.

While more responses of a kind are asked for than its graders work on, they are what is waited for,
and the time between two answers is what a response costs (`waited`), however many graders there
are. Over all the time in which any was asked for (`busy`), it costs at most as much: that says when
graders have become faster, so that none waits any more. How long responses take by themselves
(`took`) says how long a round waits for its last ones.

    asked --> RewardQueue / reward service --> answered        after each event: `looked`
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.policy.reward_forecast import part_of_octave
from rollpacker.types import DrawId


@dataclass(frozen=True, slots=True)
class RewardSums:
    """Responses that were answered, and in how many seconds."""

    responses: float = 0.0
    seconds: float = 0.0

    @property
    def per_response(self) -> float:
        """Seconds; 0 while nothing was answered."""
        return self.seconds / self.responses if self.responses else 0.0

    def plus(self, responses: float, seconds: float) -> RewardSums:
        """With more of them."""
        return RewardSums(self.responses + responses, self.seconds + seconds)

    def faded(self, share: float) -> RewardSums:
        """As much, said by a share of the responses."""
        return RewardSums(share * self.responses, share * self.seconds)


@dataclass(frozen=True, slots=True)
class RewardSpeed:
    """Of one kind of grader."""

    waited: RewardSums = field(default_factory=RewardSums)  # while more were asked for than fit
    busy: RewardSums = field(default_factory=RewardSums)  # while any was asked for
    took: Mapping[int, float] = field(default_factory=dict)  # responses, by `part_of_octave`


@dataclass(frozen=True, slots=True)
class RewardsSeen:
    """What a finished round shows of its rewards."""

    kinds: Mapping[DrawId, str] = field(default_factory=dict)  # of grader, of all its draws
    speeds: Mapping[str, RewardSpeed] = field(default_factory=dict)  # by kind


@dataclass(slots=True)
class _Grader:
    """As it was when it was last looked at."""

    at: float = 0.0
    asked: int = 0
    room: int = 0
    answered: int = 0  # since then
    waited_responses: float = 0.0
    waited_seconds: float = 0.0
    busy_responses: float = 0.0
    busy_seconds: float = 0.0
    took: Counter[int] = field(default_factory=Counter)

    @property
    def speed(self) -> RewardSpeed:
        """Until it was last looked at."""
        return RewardSpeed(
            RewardSums(self.waited_responses, self.waited_seconds),
            RewardSums(self.busy_responses, self.busy_seconds),
            dict(sorted(self.took.items())),
        )


class RewardMeter:
    """Of one round."""

    def __init__(self) -> None:
        self._graders: defaultdict[str, _Grader] = defaultdict(_Grader)

    @property
    def speeds(self) -> dict[str, RewardSpeed]:
        """By kind of grader."""
        return {kind: grader.speed for kind, grader in self._graders.items()}

    def took(self, kind: str, seconds: float) -> None:
        """A response took so long by itself, without a wait for a grader."""
        self._graders[kind].took[part_of_octave(seconds)] += 1

    def answered(self, kind: str) -> None:
        """A response has its reward, or none."""
        self._graders[kind].answered += 1

    def looked(self, at: float, kind: str, asked: int, room: int) -> None:
        """At `at` seconds so many responses are asked for and not answered; `room`: so many are
        worked on, or on their way, at once; 0: nobody knows."""
        grader = self._graders[kind]
        if grader.asked:
            count, seconds = grader.answered, at - grader.at
            if 0 < grader.room < grader.asked:
                grader.waited_responses += count
                grader.waited_seconds += seconds
            grader.busy_responses += count
            grader.busy_seconds += seconds
        grader.at, grader.asked, grader.room, grader.answered = at, asked, room, 0
