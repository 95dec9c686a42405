"""How much of a response is left when it is sampled again, some updates later, by the same seed.

Known are pairs: responses that ended both times, and whether at the same length. Two laws may be
behind them, and the likelier one counts:

    by token      each token changes with a small probability per update, and behind the first
                  changed one another response follows: exp(-rate * updates * tokens) of those
                  with so many tokens are unchanged. What weights that move do.
    by response   a share of the responses is another one, whatever their length: a table by age.

Both say how likely a response is unchanged up to any of its tokens. Most that are compared are
short, as long ones had not ended when their group was deferred; only the first law says that long
ones change sooner. Which one is likelier, and the rate, responses of sixteen tokens and more say:
shorter ones are given up or answered at once, and change for reasons of their own, in the demo
twenty times as often a token (decision 45).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

_MIN_COMPARED = 30.0  # responses: for a point of the table, or for long ones to count alone
_MIN_OCTAVE = 4  # sixteen tokens; shorter responses say little of longer ones
_RATES = (1e-9, 1.0)  # per token and update, between which the rate is looked for
_HALVINGS = 60

Unchanged = Callable[[float, float], float]  # (updates, tokens) -> probability


@dataclass(frozen=True, slots=True)
class Pairs:
    """Responses of about the same length that were sampled again after the same time."""

    compared: float = 0.0
    same: float = 0.0  # of these, those that ended at the same length again
    tokens: float = 0.0  # of them all, the first time

    def add(self, tokens: int, *, same: bool) -> Pairs:
        """With one more."""
        return Pairs(self.compared + 1.0, self.same + same, self.tokens + tokens)

    def faded(self, share: float) -> Pairs:
        """Counting less."""
        return Pairs(share * self.compared, share * self.same, share * self.tokens)


PairsSeen = Mapping[tuple[int, int], Pairs]  # by (updates, octave of the tokens)


def octave(tokens: int) -> int:
    """Responses of this octave are up to twice as long as each other."""
    return max(1, tokens).bit_length() - 1


def telling(seen: PairsSeen) -> PairsSeen:
    """Those that say how long responses change; all, while these are few."""
    pairs = {key: item for key, item in seen.items() if item.compared > 0.0 and key[0] > 0}
    long_ = {key: item for key, item in pairs.items() if key[1] >= _MIN_OCTAVE}
    are_enough = sum(item.compared for item in long_.values()) >= _MIN_COMPARED
    return long_ if are_enough else pairs


def unchanged(seen: PairsSeen) -> Unchanged:
    """The likelier law; everything stays as it is while nothing was compared."""
    pairs = telling(seen)
    if not pairs:
        return lambda _updates, _tokens: 1.0
    rate, points = _rate(pairs), _table(pairs)

    def by_token(updates: float, tokens: float) -> float:
        return math.exp(-rate * updates * tokens)

    @cache
    def share(updates: float) -> float:
        return between(points, math.log1p(updates))

    def by_response(updates: float, tokens: float) -> float:  # noqa: ARG001
        return share(updates)

    # A number more is a chance more to explain what is chance (Akaike's criterion).
    numbers_more = len(points) - 2
    found = _likelihood(pairs, by_response) - numbers_more > _likelihood(pairs, by_token)
    return by_response if len(points) > 1 and found else by_token


def _likelihood(pairs: PairsSeen, law: Unchanged) -> float:
    """Of the pairs, as a logarithm."""
    total = 0.0
    for (updates, _), item in pairs.items():
        share = min(1.0 - 1e-9, max(1e-9, law(updates, item.tokens / item.compared)))
        total += item.same * math.log(share)
        total += (item.compared - item.same) * math.log1p(-share)
    return total


def _rate(pairs: PairsSeen) -> float:
    """Changes per token and update that explain the pairs best; 0 where none has changed."""
    if all(item.same == item.compared for item in pairs.values()):
        return 0.0

    def slope(rate: float) -> float:  # of the likelihood: falls with the rate
        total = 0.0
        for (updates, _), item in pairs.items():
            exposure = updates * item.tokens / item.compared
            changed = item.compared - item.same
            total -= item.same * exposure
            total += changed * exposure / math.expm1(min(700.0, rate * exposure))
        return total

    low, high = map(math.log, _RATES)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if slope(math.exp(middle)) > 0.0 else (low, middle)
    return math.exp(low)


def _table(pairs: PairsSeen) -> list[tuple[float, float]]:
    """(log(1 + updates), share that is unchanged); neighbours together where pairs are few."""
    points = [(0.0, 1.0)]
    place, compared, same = 0.0, 0.0, 0.0
    for updates in sorted({updates for updates, _ in pairs}):
        of_age = [item for (age, _), item in pairs.items() if age == updates]
        count = sum(item.compared for item in of_age)
        place += math.log1p(updates) * count
        compared += count
        same += sum(item.same for item in of_age)
        if compared >= _MIN_COMPARED:
            points.append((place / compared, same / compared))
            place, compared, same = 0.0, 0.0, 0.0
    return points


def between(points: Sequence[tuple[float, float]], at: float) -> float:
    """A share at `at` = log(1 + updates): linear between neighbouring points, the first of which is
    (0, 1); behind the last it falls as the power of 1 + updates that goes through that one."""
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / max(1e-12, right - left)
    last, share = points[-1]
    return float(share ** (at / last)) if last > 0.0 else share
