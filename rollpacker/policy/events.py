"""What a round is told. Each event says when it happened; the round itself has no clock.

`at` is seconds on any clock that does not go back; it only ends up in the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.types import Draw, DrawId


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A rollout replica serves the round's weights."""

    at: float
    replica_id: str
    response_capacity: int  # responses at a time
    kv_budget_tokens: int = 0  # of all of them together; 0: not known, no limit
    others_follow: bool = False  # at once: nothing is launched before the last of them is there
    weight_kv_tokens: int = 0  # so many KV tokens are as many bytes as its weights; 0: not known


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A rollout replica is gone; what it was generating has to be generated elsewhere."""

    at: float
    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """A rollout replica takes no more work; its groups are ending, with what they have."""

    at: float
    replica_id: str


@dataclass(frozen=True, slots=True)
class GroupInterrupted:
    """A replica ended a group's stream before its last response; the rest goes on elsewhere.

    Late news of a replica that has lost the group since means nothing.
    """

    at: float
    draw: DrawId
    replica_id: str


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """How far a running group is."""

    at: float
    draw: DrawId
    longest_tokens: int  # of its longest response
    total_tokens: int  # of all its responses in this launch
    carried_tokens: int = 0  # of these, not decoded by this launch


@dataclass(frozen=True, slots=True)
class ResponseFinished:
    """A response ended by itself: stop token or cap."""

    at: float
    draw: DrawId
    index: int
    tokens: int
    carried_tokens: int = 0  # of these, not decoded by this launch: a moved prefix, a draft


@dataclass(frozen=True, slots=True)
class ResponseScored:
    """A response has its reward, or None: the reward service gave up on it."""

    at: float
    draw: DrawId
    index: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class GroupRestored:
    """After a crash: the group stands in the step's sample stream already, so it has won."""

    at: float
    draw: DrawId
    response_tokens: tuple[int, ...]
    carried_tokens: int = 0  # of them all, not decoded by the round


@dataclass(frozen=True, slots=True)
class DrawsAdded:
    """The answer to RequestDraws: the next prompts of the data, fewer at its end."""

    at: float
    requested: int
    draws: tuple[Draw, ...]
    restored: tuple[GroupRestored, ...] = ()  # those of them that won before a crash


Event = (
    ReplicaJoined
    | ReplicaLost
    | ReplicaDraining
    | GroupInterrupted
    | ProgressReported
    | ResponseFinished
    | ResponseScored
    | GroupRestored
    | DrawsAdded
)
