"""A run in a few numbers; all seconds are means per step on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rollpacker.policy.bias_meter import BiasMeter, LengthBias
from rollpacker.simulation.simulator import StepTrace
from rollpacker.types import DeferredDraw, DrawId, RoundKind


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean seconds of the stages of a step (the bars of Fig. 10c)."""

    sync: float  # weights to the engines
    rollout: float  # while it streams, until everything kept has its reward
    reward: float  # behind it
    train: float  # behind it

    @property
    def step(self) -> float:
        """All of them."""
        return self.sync + self.rollout + self.reward + self.train


def stages(steps: Sequence[StepTrace], *, streams: bool = True) -> Stages:
    """Means over steps. Without streaming, all rewards lie behind the rollout."""
    if not steps:
        raise ValueError("steps: none; a mean needs at least one")
    rollout = fmean(s.scored_seconds if streams else s.rollout_seconds for s in steps)
    end = fmean(s.scored_seconds + s.reward_tail_seconds for s in steps)
    return Stages(
        sync=fmean(s.refit_seconds for s in steps),
        rollout=rollout,
        reward=end - rollout,
        train=fmean(s.train_seconds for s in steps),
    )


def of_kind(steps: Sequence[StepTrace], kind: RoundKind) -> list[StepTrace]:
    """The steps of one kind."""
    return [step for step in steps if step.kind is kind]


def mean_step(steps: Sequence[StepTrace]) -> float:
    """Seconds per step, over all of them."""
    return fmean(step.step_seconds for step in steps)


def mean_rollout(steps: Sequence[StepTrace]) -> float:
    """Seconds until the last needed response, per step, over all of them."""
    return fmean(step.rollout_seconds for step in steps)


def length_bias(steps: Sequence[StepTrace]) -> LengthBias:
    """What the live bias meter would read after these steps, from the first one on."""
    meter = BiasMeter()
    queue: dict[DrawId, DeferredDraw] = {}
    for step in steps:
        finish = step.round.finish
        assert finish is not None
        trained = {draw: dict(enumerate(lengths)) for draw, lengths in step.round.emitted}
        meter.add_round(queue.values(), trained, finish)
        for draw in trained:
            queue.pop(draw, None)
        queue |= {item.draw.id: item for item in finish.deferred}
    return meter.read(queue.values())
