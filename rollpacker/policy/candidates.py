"""The replicas that may take waiting groups, for as long as nothing but launches happens.

The next group goes to the replica that comes first: fewest KV tokens outstanding (or, with
`ROUND_ROBIN`, fewest groups given so far), then most room, then the name that sorts last. A heap,
so a group costs the logarithm of the number of replicas. A replica that runs nothing takes any
group, however small its capacity; the others need room for its responses and its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollpacker.policy.round_state import Replica
from rollpacker.policy.tail_batching import Routing


@dataclass(slots=True)
class Candidate:
    """A replica in the heap; what it compares by changes only while it is out of it."""

    name: str
    replica: Replica
    outstanding: int  # KV tokens that its running responses are expected to need
    routing: Routing

    def __lt__(self, other: Candidate) -> bool:
        mine, others = self._key(), other._key()
        return mine < others if mine != others else self.name > other.name

    def _key(self) -> tuple[int, int]:
        in_turn = self.routing is Routing.ROUND_ROBIN
        return (self.replica.turns if in_turn else self.outstanding, -self.replica.room())

    def takes(self, responses: int, tokens: int) -> bool:
        """Whether a group of so many open responses and tokens fits."""
        if not self.replica.running:
            return True
        limit = self.replica.kv_budget_tokens
        has_room = self.replica.room() >= responses
        return has_room and not (limit and self.outstanding + tokens > limit)


class Candidates:
    """See the top of the file."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        outstanding_of: Callable[[Replica], int],
        routing: Routing,
    ) -> None:
        self._heap = [
            Candidate(name, replica, outstanding_of(replica), routing)
            for name, replica in replicas.items()
            if not replica.draining and (not replica.running or replica.room() > 0)
        ]
        heapq.heapify(self._heap)

    def take(self, responses: int, tokens: int) -> Candidate | None:
        """The first that takes such a group; it is out until it is put back."""
        refused = []
        found = None
        while self._heap and found is None:
            first = heapq.heappop(self._heap)
            if first.takes(responses, tokens):
                found = first
            else:
                refused.append(first)
        for candidate in refused:
            self.put_back(candidate)
        return found

    def put_back(self, candidate: Candidate) -> None:
        """It may take another group."""
        heapq.heappush(self._heap, candidate)
