"""Group-relative advantages (GRPO, arXiv 2402.03300, equation of outcome supervision).

Group-local on purpose: an advantage that looked beyond its group would depend on which groups
happen to share a step, and tail batching decides that by length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-6


def group_relative(rewards: Sequence[float | None]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-6) within one group; population deviation.

    A missing reward (None) is left out of the statistics and gets 0. A group with fewer than two
    rewards, or with equal ones, gets 0 throughout.
    """
    given = [reward for reward in rewards if reward is not None]
    if len(given) < 2 or max(given) == min(given):
        return [0.0] * len(rewards)
    mean = math.fsum(given) / len(given)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in given) / len(given))
    return [
        0.0 if reward is None else (reward - mean) / (deviation + _EPSILON) for reward in rewards
    ]
