"""What a simulated round is given of each draw, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.reward_meter import RewardsSeen
from rollpacker.simulation.redraws import Attempts
from rollpacker.types import DrawId


@dataclass(frozen=True, slots=True)
class Launchable:
    """What the models know of a draw and the policy does not."""

    lengths: Sequence[int]  # tokens at which each response ends
    carried: Sequence[int] = ()  # draft tokens that the engine accepts, of the first responses
    attempts: Attempts = field(default_factory=dict)  # before these lengths; see `redraws`
    task: str = "math"
    prompt: int = 0  # number of the prompt, for the anchors of time limits
    prompt_tokens: int = 200
    cap: int = 0  # tokens at which a response is cut off; 0: never

    def to_score(self, index: int) -> tuple[int, str, bool]:
        """A response as the reward model takes it: (prompt, task, whether it was cut off)."""
        return self.prompt, self.task, 0 < self.cap <= self.lengths[index]


@dataclass(slots=True)
class RoundTrace:
    """What happened in a round; times in seconds on the virtual clock."""

    start: float
    end: float = 0.0  # FinishRound: all that is kept has been emitted
    finish: FinishRound | None = None
    trained_tokens: int = 0
    emitted: list[tuple[DrawId, tuple[int, ...]]] = field(default_factory=list)  # with lengths
    spans: list[tuple[float, float]] = field(default_factory=list)  # of each replica's work
    commands: int = 0
    carried_tokens: dict[DrawId, int] = field(default_factory=dict)  # of finished responses
    meter: EngineMeter | None = None  # of the engines' speed, where somebody wants it
    rewards: RewardsSeen = field(default_factory=RewardsSeen)
