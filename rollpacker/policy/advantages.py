"""Advantages of a prompt group: a pure function of its own rewards and lengths.

Group-local on purpose: an advantage that looked beyond its group would depend on which groups
happen to share a step, and tail batching decides that by length. So REINFORCE++ divides by a
deviation that the run declares (measured over whole cycles), never by that of a batch.

A response counts in the statistics of its group when it has a reward and at least one token;
every other one gets 0. A group that has fewer than two such responses, or equal rewards among
them, gets 0 throughout: it says nothing about which response was better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.algorithms import Estimator

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class OverlongShaping:
    """DAPO's soft punishment: the reward falls over the last tokens below the cap."""

    cap_tokens: int  # longest response
    buffer_tokens: int  # the fall begins so many tokens below the cap, >= 1
    penalty: float  # taken off a response at the cap, >= 0

    def shaped(self, reward: float, tokens: int) -> float:
        """The reward of a response of so many tokens; falls linearly within the buffer."""
        overlong = tokens - (self.cap_tokens - self.buffer_tokens)
        share = min(1.0, max(0.0, overlong / self.buffer_tokens))
        return reward - self.penalty * share


@dataclass(frozen=True, slots=True)
class AdvantageRules:
    """How the advantages of a run are computed."""

    estimator: Estimator = Estimator.STANDARDISED
    deviation: float = 1.0  # what SCALED divides by, > 0
    overlong: OverlongShaping | None = None


GROUP_RELATIVE = AdvantageRules()


def group_advantages(
    rules: AdvantageRules, rewards: Sequence[float | None], tokens: Sequence[int]
) -> list[float]:
    """One advantage per response. `rewards` has None where the reward service gave up; `tokens`
    are the lengths of the responses, in the same order."""
    shaped = [
        None if reward is None or count == 0 else _shaped(rules, reward, count)
        for reward, count in zip(rewards, tokens, strict=True)
    ]
    given = [reward for reward in shaped if reward is not None]
    if len(given) < 2 or max(given) == min(given):
        return [0.0] * len(shaped)
    mean = math.fsum(given) / len(given)
    divisor = _divisor(rules, given, mean)
    return [0.0 if reward is None else (reward - mean) / divisor for reward in shaped]


def _shaped(rules: AdvantageRules, reward: float, tokens: int) -> float:
    return rules.overlong.shaped(reward, tokens) if rules.overlong else reward


def _divisor(rules: AdvantageRules, given: Sequence[float], mean: float) -> float:
    """What the distance from the mean is divided by. Deviations are population deviations."""
    match rules.estimator:
        case Estimator.STANDARDISED:
            variance = math.fsum((reward - mean) ** 2 for reward in given) / len(given)
            return math.sqrt(variance) + _EPSILON
        case Estimator.CENTRED:
            return 1.0
        case Estimator.LEAVE_ONE_OUT:  # r - mean of the others = (r - mean) * n / (n - 1)
            return (len(given) - 1) / len(given)
        case Estimator.SCALED:
            return rules.deviation
