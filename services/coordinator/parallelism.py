"""The tensor-parallel sizes of one run, where preemptions decide them, and how many replicas serve.

Short and long rounds have sizes of their own. A size is asked for by the spec of a round; the
replica says how long it took to get there. A resize holds for as many rounds of its kind as follow
each other, so that is what must earn its cost back; more than half of a round's time a doubling
cannot save. Kept in memory: a coordinator that takes over begins with the smallest size again.
"""

from __future__ import annotations

from collections import defaultdict

from rollpacker.policy.parallelism import (
    ParallelismRules,
    ParallelismState,
    ResizeCost,
    after_round,
)
from rollpacker.types import RoundKind

_LARGEST_SAVING = 0.5  # of a round's seconds, by twice the devices


class ServedCounts:
    """How many replicas have served at each size: at a larger one, fewer find devices."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last_size = 0

    def served(self, size: int, count: int) -> None:
        """A round had so many."""
        self._counts[size], self._last_size = count, size

    def expected(self, size: int) -> int:
        """In the next round; 0: not known. At a size that is new, as many as there are devices for,
        by the last round."""
        if size and size not in self._counts and self._last_size:
            return self._counts[self._last_size] * self._last_size // size
        return self._counts.get(size, 0) if size else 0


class ParallelismPlanner:
    """Sizes by kind of round."""

    def __init__(self, smallest: int, largest: int) -> None:
        self._rules = ParallelismRules(smallest, largest)
        self._states: dict[RoundKind, ParallelismState] = {}
        self._in_force = smallest
        self._resize_seconds: float | None = None  # of the last resize
        self._last_kind: RoundKind | None = None
        self._in_a_row: defaultdict[RoundKind, int] = defaultdict(int)

    def size(self, kind: RoundKind) -> int:
        """For the next round of a kind."""
        return self._state(kind).size

    def applied(self, size: int, seconds: float) -> None:
        """A round's replicas serve with `size`; getting there took the slowest one `seconds`."""
        if size != self._in_force:
            self._in_force, self._resize_seconds = size, seconds

    def after_round(self, kind: RoundKind, preemptions: int, rollout_seconds: float) -> None:
        """A round is over; `preemptions` of all its replicas."""
        self._in_a_row[kind] = self._in_a_row[kind] + 1 if kind is self._last_kind else 1
        self._last_kind = kind
        cost = None
        if self._resize_seconds is not None:
            saved = rollout_seconds * _LARGEST_SAVING
            cost = ResizeCost(self._resize_seconds, saved, self._in_a_row[kind])
        self._states[kind] = after_round(self._rules, self._state(kind), preemptions, cost)

    def _state(self, kind: RoundKind) -> ParallelismState:
        return self._states.get(kind, ParallelismState(self._rules.smallest))
