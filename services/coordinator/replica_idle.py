"""How long the replicas of a round had nothing to do: its bubbles.

A replica counts from the moment it serves the round's weights until it is lost, or the round ends;
it is idle while no group runs on it. Pure: time comes with every call, in monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Times:
    since: float  # of the last change
    serves: bool = True
    groups: int = 0
    idle: float = 0.0
    total: float = 0.0

    def pass_to(self, now: float) -> None:
        """Book the time since the last change."""
        if self.serves:
            self.total += now - self.since
            self.idle += 0.0 if self.groups else now - self.since
        self.since = now


class ReplicaIdle:
    """The bubbles of one round."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Times] = {}

    def joined(self, replica_id: str, now: float) -> None:
        """The replica takes work from now on."""
        times = self._replicas.setdefault(replica_id, _Times(now))
        times.pass_to(now)
        times.serves = True

    def lost(self, replica_id: str, now: float) -> None:
        """The replica takes no more work."""
        self._replicas[replica_id].pass_to(now)
        self._replicas[replica_id].serves = False

    def group_started(self, replica_id: str, now: float) -> None:
        self._replicas[replica_id].pass_to(now)
        self._replicas[replica_id].groups += 1

    def group_ended(self, replica_id: str, now: float) -> None:
        self._replicas[replica_id].pass_to(now)
        self._replicas[replica_id].groups -= 1

    def share(self, now: float) -> float:
        """Idle time / all time of the replicas so far, 0 to 1."""
        for times in self._replicas.values():
            times.pass_to(now)
        total = sum(times.total for times in self._replicas.values())
        return sum(times.idle for times in self._replicas.values()) / total if total > 0 else 0.0
