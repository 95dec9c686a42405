"""How long a round waits for its rewards, from what is known of the graders.

Two things keep it waiting, each by kind of grader:

    work   a response after the other: what is behind a point of the round is asked for later than
           that, and takes its number times the seconds of one
    last   of those that are asked for near the end, some take long by themselves: the last one is
           there when half a chance is left that none takes longer

Responses that were cut off at the cap hold nothing that takes long (no whole program, no answer):
they count as work only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul

from rollpacker.policy.group_law import GroupLaw

_EVEN_CHANCE = math.log(2.0)  # expected number of later ones, when half a chance of none is left
_HALVINGS = 10
_PARTS = 4.0  # of an octave


def part_of_octave(seconds: float) -> int:
    """Under which what took so long is counted: a quarter of an octave of milliseconds, 0 first."""
    return int(_PARTS * math.log2(max(1.0, 1000.0 * seconds)))


@dataclass(frozen=True, slots=True)
class GraderMeasure:
    """Of one kind of grader."""

    seconds_per_response: float = 0.0  # while it is what is waited for; 0: it never was
    took: Mapping[int, float] = field(default_factory=dict)  # responses by part of an octave
    _beyond: tuple[float, ...] = field(init=False, repr=False)  # share in this part or a longer one

    def __post_init__(self) -> None:
        counts = [self.took.get(part, 0.0) for part in range(max(self.took, default=-1) + 1)]
        beyond = list(accumulate(reversed(counts)))[::-1]
        total = beyond[0] if beyond else 0.0
        shares = tuple(count / total for count in beyond) if total else ()
        object.__setattr__(self, "_beyond", shares)

    @property
    def longest(self) -> float:
        """Seconds that no response takes longer than; 0 while none is known."""
        return math.exp2(len(self._beyond) / _PARTS) / 1000.0 if self._beyond else 0.0

    def longer(self, seconds: float) -> float:
        """The share of responses that take longer."""
        if seconds <= 0.0:
            return 1.0
        at = _PARTS * math.log2(max(1.0, 1000.0 * seconds))
        part = int(at)
        if part >= len(self._beyond):
            return 0.0
        after = self._beyond[part + 1] if part + 1 < len(self._beyond) else 0.0
        return after + (part + 1.0 - at) * (self._beyond[part] - after)


def scored_seconds(
    graders: Mapping[str, GraderMeasure],
    law: GroupLaw,
    profile: Sequence[float],
    kept: Sequence[float],
    ends: Sequence[float],
    places: Sequence[int],
) -> list[float]:
    """Until the rewards of a round are known, for each of the cases in which it may end.

    `profile`: seconds at each point of the law's grid. `kept`: groups that it trains, by bin.
    `ends`, `places`: seconds of decoding in each case, and the last point of the grid before that.
    """
    work = [0.0] * len(law.grid)
    wait = 0.0
    middle = sorted(places)[len(places) // 2]
    for kind, grader in graders.items():
        running = _running(law, kind, tuple(kept))
        if grader.seconds_per_response:
            for place, count in enumerate(running[:-1]):
                behind = grader.seconds_per_response * count
                work[place] = max(work[place], profile[place] + behind)
        if running and grader.took:
            wait = max(wait, _last(grader, profile[: middle + 2], running))
    upto = list(accumulate(work, max))
    return [max(end + wait, upto[place]) for end, place in zip(ends, places, strict=True)]


@lru_cache(maxsize=512)  # the same at any size of the engines
def _running(law: GroupLaw, kind: str, kept: tuple[float, ...]) -> list[float]:
    """Responses of a kind behind each point of the grid, and those that meet the cap."""
    return [sum(map(mul, kept, row)) for row in law.alive_by_grader.get(kind, ())]


def _last(grader: GraderMeasure, times: Sequence[float], running: Sequence[float]) -> float:
    """Seconds behind the last of these times until the last response has its reward."""
    asked = [
        (times[-1] - at, before - after)
        for at, (before, after) in zip(times[1:], pairwise(running), strict=False)
        if before > after and times[-1] - at < grader.longest
    ]

    def later(seconds: float) -> float:
        return sum(count * grader.longer(since + seconds) for since, count in asked)

    if later(1e-3) <= _EVEN_CHANCE:
        return 0.0
    low, high = 0.0, grader.longest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if later(middle) > _EVEN_CHANCE else (low, middle)
    return high
