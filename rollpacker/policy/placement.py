"""Where the groups of a round run: the replicas, and the groups that wait for room on one.

    WAITING --launch: a replica has room--> RUNNING --take_off--> complete, or lost
       ^                                       |
       +--- its replica lost, interrupted -----+

A group runs on one replica. Groups wait in an order: those that were interrupted first, then the
ones that are expected to be longest. Each goes to the replica with the fewest tokens outstanding
that has room within its KV budget (`rollpacker.policy.candidates`). Who wins does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rollpacker.policy.candidates import Candidates
from rollpacker.policy.commands import Command, LaunchGroup
from rollpacker.policy.events import ReplicaJoined
from rollpacker.policy.rebalance import group_to_move
from rollpacker.policy.round_state import Group, GroupState, Replica
from rollpacker.policy.scale_down import ReplicaLoad
from rollpacker.policy.tail_batching import Routing
from rollpacker.types import DrawId


class Placement:
    """See the top of the file."""

    def __init__(self, groups: Mapping[DrawId, Group], routing: Routing) -> None:
        """`groups`: of the round, in launch order; it grows with the round."""
        self._groups = groups
        self._routing = routing
        self._replicas: dict[str, Replica] = {}
        self._queue = deque(sorted(groups.values(), key=lambda group: -group.expected_tokens))

    # --- what happens -------------------------------------------------------------------------

    def joined(self, event: ReplicaJoined) -> None:
        """A replica takes groups from now on, or has other room than before."""
        known = self._replicas.setdefault(event.replica_id, Replica(0, 0))
        known.capacity, known.draining = event.response_capacity, False
        known.kv_budget_tokens = event.kv_budget_tokens

    def draining(self, replica_id: str) -> None:
        """It takes no more groups."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.draining = True

    def lost(self, replica_id: str) -> None:
        """Its groups wait again, the last to be launched first."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for draw in [draw for draw in self._groups if draw in replica.running]:
            self._put_back(self._groups[draw])

    def interrupted(self, group: Group, replica_id: str) -> None:
        """It runs no more on this replica, and waits again."""
        if group.state is GroupState.RUNNING and group.replica_id == replica_id:
            self._put_back(group)

    def response_finished(self, group: Group) -> None:
        """One response of a running group has finished."""
        self._replicas[group.replica_id].used -= 1

    def added(self, group: Group) -> None:
        """One more group waits, as the last."""
        self._queue.append(group)

    def take_off(self, group: Group) -> None:
        """A group neither runs nor waits from now on; its new state is for the caller to set."""
        replica = self._replicas.get(group.replica_id)
        if replica is not None and group.draw.id in replica.running:
            replica.running.discard(group.draw.id)
            replica.used -= len(group.missing())

    def _put_back(self, group: Group) -> None:
        self.take_off(group)
        group.state = GroupState.WAITING
        group.end_launch()
        self._queue.appendleft(group)

    # --- what to do ---------------------------------------------------------------------------

    def launch(self) -> list[Command]:
        """Fill the replicas with waiting groups, in their order."""
        if not self.has_waiting():
            return []
        commands: list[Command] = []
        candidates = Candidates(self._replicas, self._outstanding_of, self._routing)
        while self.has_waiting():
            group = self._queue[0]
            indices, tokens = group.missing(), group.outstanding_tokens()
            candidate = candidates.take(len(indices), tokens)
            if candidate is None:
                break
            self._queue.popleft()
            group.begin_launch(candidate.name)
            candidate.replica.running.add(group.draw.id)
            candidate.replica.used += len(indices)
            candidate.replica.turns += 1
            candidate.outstanding += tokens
            candidates.put_back(candidate)
            commands.append(LaunchGroup(group.draw.id, candidate.name, indices))
        return commands

    def group_to_move(self) -> tuple[DrawId, str] | None:
        """A running group that an idle replica should take over, and where it runs."""
        deals_in_turn = self._routing is Routing.ROUND_ROBIN  # not to where there is room
        if deals_in_turn or not self.idle_replicas():
            return None
        return group_to_move(self._replicas, self._groups)

    # --- how it is ----------------------------------------------------------------------------

    def has_waiting(self) -> bool:
        """Whether a group waits for room."""
        while self._queue and self._queue[0].state is not GroupState.WAITING:
            self._queue.popleft()  # it was taken off
        return bool(self._queue)

    def is_at_rest(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.has_waiting() and not any(r.running for r in self._replicas.values())

    def idle_replicas(self) -> tuple[str, ...]:
        """Those that run no group, while others run the last ones and none waits."""
        replicas = self._replicas.items()
        if self.has_waiting() or not any(replica.running for _, replica in replicas):
            return ()
        return tuple(n for n, r in replicas if not r.running and not r.draining)

    def loads(self, prompt_tokens: Mapping[DrawId, int]) -> list[ReplicaLoad]:
        """What runs where; empty while a group waits for room, as every replica is needed then."""
        if self.has_waiting():
            return []
        return [
            replica.load(name, self._groups, prompt_tokens)
            for name, replica in self._replicas.items()
            if not replica.draining
        ]

    def _outstanding_of(self, replica: Replica) -> int:
        return sum(self._groups[draw].outstanding_tokens() for draw in replica.running)
