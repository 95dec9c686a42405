"""How long responses are, from what has been seen: a Kaplan-Meier curve with weights.

A response that was cut off says only that it is longer than that; its weight goes to the longer
ones (redistribution to the right). What is longer than everything that ended counts as ending at
the longest length seen. Weights let recent responses count more.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observation:
    """One response (or one group, by its longest response)."""

    tokens: int  # at which it ended, or was cut off
    finished: bool
    weight: float = 1.0  # > 0


class LengthCurve:
    """Survival of the length in tokens; immutable."""

    def __init__(self, observations: Iterable[Observation]) -> None:
        """Raises ValueError without any observation."""
        ordered = sorted(observations, key=lambda item: (item.tokens, not item.finished))
        if not ordered:
            raise ValueError("observations: none; a length curve needs at least one")
        at_risk = sum(item.weight for item in ordered)
        survival = 1.0
        self._tokens: list[int] = [0]
        self._survival: list[float] = [1.0]  # behind each token count
        for item in ordered:
            if item.finished and at_risk > 0:
                survival *= max(0.0, 1.0 - item.weight / at_risk)
            at_risk -= item.weight
            if item.tokens == self._tokens[-1]:
                self._survival[-1] = survival
            else:
                self._tokens.append(item.tokens)
                self._survival.append(survival)
        self._survival[-1] = 0.0
        self._rest = [0.0] * len(self._tokens)  # integral of the survival from each point on
        for place in range(len(self._tokens) - 2, -1, -1):
            width = self._tokens[place + 1] - self._tokens[place]
            self._rest[place] = self._rest[place + 1] + width * self._survival[place]

    def survival(self, tokens: float) -> float:
        """Share of the responses with more than so many tokens."""
        return self._survival[max(0, bisect.bisect_right(self._tokens, tokens) - 1)]

    def quantile(self, share: float) -> int:
        """The fewest tokens within which at least `share` of the responses end."""
        for tokens, survival in zip(self._tokens, self._survival, strict=True):
            if 1.0 - survival >= share - 1e-12:
                return tokens
        return self._tokens[-1]

    def mean(self) -> float:
        """Mean tokens, restricted to the longest length seen."""
        return self._rest[0]

    def mean_beyond(self, tokens: int) -> float:
        """Expected final tokens of a response that has `tokens` and runs."""
        place = max(0, bisect.bisect_right(self._tokens, tokens) - 1)
        survival = self._survival[place]
        if survival <= 0.0:
            return float(tokens)
        return tokens + self._rest[place] / survival - (tokens - self._tokens[place])
