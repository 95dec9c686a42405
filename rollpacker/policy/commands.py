"""What a round asks for. The live coordinator and the simulator carry these out."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.types import DeferredDraw, DrawId


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """Sample these responses of a draw on one replica."""

    draw: DrawId
    replica_id: str
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortGroup:
    """Stop sampling a draw: it has lost the race, or has all the responses it needs."""

    draw: DrawId


@dataclass(frozen=True, slots=True)
class ScoreResponse:
    """Send a finished response to the reward service."""

    draw: DrawId
    index: int


@dataclass(frozen=True, slots=True)
class RequestDraws:
    """Launch so many new prompts in place of flat groups; answered by DrawsAdded."""

    count: int


@dataclass(frozen=True, slots=True)
class EmitGroup:
    """Append a group to the step's sample stream; advantages are in the order of indices."""

    draw: DrawId
    indices: tuple[int, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FinishRound:
    """The round is over: everything that is kept has been emitted."""

    winners: tuple[DrawId, ...]  # in the order in which they were emitted
    deferred: tuple[DeferredDraw, ...]  # in launch order
    generated_tokens: int  # decoded by this round, aborted responses included
    rollout_seconds: float  # from the first event to the last response that was needed
    race_wait_seconds: float  # of these, after enough groups were complete to fill the step
    flat: tuple[DrawId, ...] = ()  # dropped: no advantage in the whole group; in launch order
    cut_tokens: tuple[int, ...] = ()  # of responses of the winners that were let go unfinished
    # Of each deferred draw: its longest response has more tokens than this. Empty: the race did not
    # go by length.
    cuts: tuple[int, ...] = ()


Command = LaunchGroup | AbortGroup | ScoreResponse | RequestDraws | EmitGroup | FinishRound
