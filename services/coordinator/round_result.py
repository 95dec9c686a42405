"""How a round ends in the coordinator: with a result, or with an error that ends the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.reward_meter import RewardsSeen
from rollpacker.types import Draft, Draw, DrawId, PromptGroup
from services.coordinator.carry_over import CheckedDraft


class RoundFailedError(Exception):
    """The round cannot be finished; the message says why and what to do."""


@dataclass(slots=True)
class RoundResult:
    """A finished round."""

    finish: FinishRound
    groups: list[PromptGroup] = field(default_factory=list)  # in the order of the stream
    apply_seconds: float = 0.0  # until the first replica served the weights
    reward_wait_seconds: float = 0.0  # behind the rollout, until the winners had their rewards
    idle_share: float = 0.0  # of the replicas' time, without a group
    drafts: dict[DrawId, tuple[Draft, ...]] = field(default_factory=dict)  # of the deferred draws
    checked_drafts: tuple[CheckedDraft, ...] = ()
    flat_draws: tuple[Draw, ...] = ()  # dropped by dynamic sampling
    tensor_parallel_size: int = 0  # that was asked for; 0: none
    preemptions: int = 0  # of the replicas that served to the end
    released: tuple[float, ...] = ()  # for each released replica, seconds until the end
    moved_groups: int = 0  # that an idle replica took over
    rewards: RewardsSeen = field(default_factory=RewardsSeen)
    meter: EngineMeter | None = None  # of the engines' speed, where the run remembers its rounds
