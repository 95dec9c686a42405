"""The measured law of prompt groups: how long their longest response is, and all of them.

Groups that were cut off when they were deferred give their weight to longer ones of their kind
(Kaplan-Meier, by redistribution to the right). The law is read at shares of the groups, in order of
their longest response, and in bins of neighbouring groups, which the planner moves between levels.
No bin holds both groups that end by themselves and groups that meet the cap. The longest complete
group stands for `stand_in` groups, itself and those that were cut off. Where these are many, the
tail is a guess.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

_ALIKE = 5  # groups, at least, to which one that was cut off gives its weight
_GRID = 40  # points of the integral over tokens
# Shares of the groups at which bins meet: finer where levels cut, and towards the longest.
_EDGES = (
    *(0.03 * n for n in range(20)),
    *(0.6 + 0.01 * n for n in range(30)),
    *(0.9 + 0.1 * n / 30 for n in range(31)),
)


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """A group as it was last seen: complete, or cut off when it was deferred."""

    response_tokens: tuple[int, ...]
    complete: bool
    weight: float = 1.0  # less for older ones
    grader: str = ""  # kind of it

    @property
    def longest(self) -> int:
        """Tokens of its longest response so far."""
        return max(self.response_tokens)


@dataclass(frozen=True, slots=True)
class Bin:
    """Groups of neighbouring longest responses."""

    mass: float  # share of all groups
    first_key: float  # longest response of the first of them, in tokens
    last_key: float  # of the last of them
    tokens: float  # mean of a group
    fresh_tokens: float  # mean of a group of the same prompts that is drawn afresh


class GroupLaw:
    """The measured law of groups, in order of their longest response; immutable."""

    def __init__(self, groups: Sequence[ObservedGroup], cap: int) -> None:
        kept, self.stand_in = _redistributed(groups)
        total = sum(weight for _, weight in kept)
        self.size = effective_size([group.weight for group in groups])
        self.keys = [float(group.longest) for group, _ in kept]
        self.upto = [0.0]  # share of the groups before the i-th
        for _, weight in kept:
            self.upto.append(self.upto[-1] + weight / total)
        top = math.log(cap + 1.0)
        self.grid = [math.expm1(top * point / _GRID) for point in range(_GRID + 1)]
        rows = [sorted(group.response_tokens) for group, _ in kept]
        weights = [weight / total for _, weight in kept]
        counts = [
            [float(len(row) - bisect.bisect_right(row, tokens)) for row in rows]
            for tokens in self.grid[:-1]
        ]
        self._tokens = _behind([float(sum(row)) for row in rows], weights)
        self._fresh = _Fresh(rows, weights)
        by_themselves = sum(key < cap for key in self.keys)  # groups that end before the cap
        self._edges = _with(_EDGES, self.upto[by_themselves])
        self.bins = tuple(self._bin(low, high) for low, high in pairwise(self._edges))
        # For each point of the grid, by bin: responses with more tokens, and mean of the square.
        self.alive = [self._by_bin(_behind(row, weights)) for row in counts]
        self.alive_squared = [
            self._by_bin(_behind([n * n for n in row], weights)) for row in counts
        ]
        graders = [group.grader for group, _ in kept]
        counts.append([float(len(row) - bisect.bisect_left(row, cap)) for row in rows])
        self.alive_by_grader = {  # those that a kind of grader scores; and those that meet the cap
            kind: [self._by_bin(_behind(_only(row, graders, kind), weights)) for row in counts]
            for kind in sorted(set(graders))
        }

    def _bin(self, low: float, high: float) -> Bin:
        return Bin(
            high - low,
            self.key_at(low + 1e-9),
            self.key_at(high),
            self.tokens(low, high),
            self._fresh.tokens(low, high),
        )

    def _by_bin(self, sums: list[float]) -> tuple[float, ...]:
        return tuple(self._between(sums, low, high) for low, high in pairwise(self._edges))

    def key_at(self, share: float) -> float:
        """Longest response of the group at this share, in tokens."""
        place = bisect.bisect_left(self.upto, share - 1e-12) - 1
        return self.keys[min(max(place, 0), len(self.keys) - 1)]

    def tokens(self, low: float, high: float) -> float:
        """Mean tokens of a group between two shares."""
        return self._between(self._tokens, low, high)

    def _between(self, sums: list[float], low: float, high: float) -> float:
        beyond = (self._mean_beyond(sums, share) * (1.0 - share) for share in (low, high))
        return (next(beyond) - next(beyond)) / (high - low)

    def _mean_beyond(self, sums: list[float], share: float) -> float:
        """Interpolated between groups, so that a share inside a group counts its part."""
        place = min(max(bisect.bisect_right(self.upto, share) - 1, 0), len(self.keys) - 1)
        width = self.upto[place + 1] - self.upto[place]
        part = (share - self.upto[place]) / width if width > 0 else 0.0
        total = sums[place] + (sums[place + 1] - sums[place]) * part
        return total / max(1e-12, 1.0 - share)


def _with(edges: Sequence[float], share: float) -> tuple[float, ...]:
    """With one more edge, unless there is one that near that no group is between them."""
    if min(abs(share - edge) for edge in edges) < 1e-4:
        return tuple(edges)
    return tuple(sorted((*edges, share)))


def effective_size(weights: Sequence[float]) -> float:
    """So many groups of equal weight would say as much."""
    return sum(weights) ** 2 / sum(weight**2 for weight in weights)


def _redistributed(
    groups: Sequence[ObservedGroup],
) -> tuple[list[tuple[ObservedGroup, float]], float]:
    """Complete groups by key; those that were cut off give their weight to the longer ones.

    To those of which about as many responses had more tokens than that: prompts decide lengths too,
    and of the groups whose responses change until they come back, those of long prompts are seen
    whole more often. Behind the longest complete group there is none to give it to: it goes to that
    one. For how many groups that one stands is returned too.
    """
    ordered = sorted(groups, key=lambda group: (group.longest, not group.complete))
    longest = [group.longest for group in ordered]
    rows = [sorted(group.response_tokens) for group in ordered]
    weights = [group.weight for group in ordered]
    last = max(place for place, group in enumerate(ordered) if group.complete)
    cut, alike = -1, {}
    for place, group in enumerate(ordered):
        if group.complete:
            continue
        if group.longest != cut:
            cut = group.longest
            alike = _by_running(rows, range(bisect.bisect_right(longest, cut), len(rows)), cut)
        running = len(rows[place]) - bisect.bisect_left(rows[place], cut)
        heirs = _nearest(alike, running) or [last]
        whole = sum(weights[heir] for heir in heirs)
        gain = 1.0 + weights[place] / whole
        for heir in heirs:
            weights[heir] *= gain
        weights[place] = 0.0
    kept = [(g, weight) for g, weight in zip(ordered, weights, strict=True) if g.complete]
    return kept, weights[last] / ordered[last].weight


def _by_running(
    rows: Sequence[Sequence[int]], places: Sequence[int], tokens: int
) -> dict[int, list[int]]:
    """Places of groups by how many of their responses have more than so many tokens."""
    found: dict[int, list[int]] = {}
    for place in places:
        running = len(rows[place]) - bisect.bisect_right(rows[place], tokens)
        found.setdefault(running, []).append(place)
    return found


def _nearest(by_running: Mapping[int, list[int]], running: int) -> list[int]:
    """Those with the nearest count, and the next ones while they are few."""
    heirs: list[int] = []
    for count in sorted(by_running, key=lambda count: (abs(count - running), count)):
        if len(heirs) >= _ALIKE:
            break
        heirs += by_running[count]
    return heirs


def _only(values: Sequence[float], graders: Sequence[str], kind: str) -> list[float]:
    return [value if it == kind else 0.0 for value, it in zip(values, graders, strict=True)]


def _behind(values: list[float], weights: list[float]) -> list[float]:
    """Weighted sums from each place on."""
    return list(accumulate(map(mul, reversed(values), reversed(weights)), initial=0.0))[::-1]


class _Fresh:
    """Tokens of a fresh group by the share at which the group before it stood.

    Each response of a group is as good as a fresh one beside the others: those that are behind it
    in the order of *their* longest say how long it is when its prompt is drawn again.
    """

    def __init__(self, rows: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        """Each row in order, shortest first."""
        found = [
            (float(row[-2] if k == len(row) - 1 else row[-1]), row[k], weight / len(row))
            for row, weight in zip(rows, weights, strict=True)
            if len(row) > 1
            for k in range(len(row))
        ]
        found.sort(key=lambda item: item[0])
        size = len(rows[0])
        self._shares, self._sums = [0.0], [0.0]
        for _, tokens, weight in found:
            self._shares.append(self._shares[-1] + weight)
            self._sums.append(self._sums[-1] + weight * tokens * size)

    def tokens(self, low: float, high: float) -> float:
        """Mean of a group; 0 where groups have one response."""
        scale = self._shares[-1]
        return (self._upto(high * scale) - self._upto(low * scale)) / (high - low)

    def _upto(self, share: float) -> float:
        place = min(max(bisect.bisect_right(self._shares, share) - 1, 0), len(self._shares) - 2)
        if place < 0:
            return 0.0
        width = self._shares[place + 1] - self._shares[place]
        part = min(1.0, (share - self._shares[place]) / width) if width > 0 else 0.0
        return self._sums[place] + (self._sums[place + 1] - self._sums[place]) * part
