"""Which source the n-th prompt of a weighted mix comes from.

Every source has given its share of the first n prompts to within one, for every n: the k-th prompt
of a source with share w comes not before position k / w and before position (k + 1) / w, and of
those that may come the one with the earliest end comes. So no round has much more of a source than
its weight says, and there is no randomness to resume: the counts so far decide what comes next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class WeightedMix:
    """Sources by number, with positive weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises ValueError unless all weights are positive and finite."""
        if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"weights: {list(weights)} are not all positive numbers")
        shares = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(share.denominator for share in shares))
        self._weights = [int(share * scale) for share in shares]
        self._total = sum(self._weights)

    def following(self, counts: Sequence[int], number: int) -> list[int]:
        """The sources of the next `number` prompts after each has given `counts`."""
        so_far = list(counts)
        chosen = []
        for position in range(sum(so_far), sum(so_far) + number):
            source = min(
                (i for i in range(len(so_far)) if self._may_come(i, so_far[i], position)),
                key=lambda i: (self._end(i, so_far[i]), i),
            )
            so_far[source] += 1
            chosen.append(source)
        return chosen

    def _may_come(self, source: int, given: int, position: int) -> bool:
        return given * self._total < self._weights[source] * (position + 1)

    def _end(self, source: int, given: int) -> int:
        """The position before which the source's next prompt must come."""
        return -(-(given + 1) * self._total // self._weights[source])
