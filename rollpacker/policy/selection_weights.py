"""How much a group that was deferred would have to count, for deferring not to select by length.

A race keeps a group at once if its longest response has at most `cut` tokens; the others come again
under newer weights. There some turn out short, and nothing makes up for the long ones that they
were: what is trained is too short. Which groups these are is known, so it can be weighed out. What
happens to a group from launch to launch is reversible: each response is the same up to its first
changed token, and sampled afresh behind it. So of the groups that lost, those that stay longer than
the cut come out as

    law(group) * P(this group would stay, were it launched once more)

and with 1 / P as their weight, and 0 for those that turn short, what is trained has the law of
groups that nobody selects. P is a product over the responses: of length n, the prompt's survival
function S, and u(x), the probability that nothing changes before token x,

    P(n comes out with at most cut) = [n <= cut] u(n) + sum over x < min(n, cut) of
                                      (u(x) - u(x + 1)) * (1 - S(cut) / S(x))

That is exact for known S and u, if S is the same before and after, launches change independently of
each other and of what the tokens say, and no cut is lower than the one before. S is taken from the
group's own responses, which are few, so what comes out is near. Nothing live uses these weights
yet; the simulator reports what they would give (decision 43).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Relaunch:
    """A group that lost a race, and what came out the next time."""

    cut: int  # tokens of the longest response that was kept; 1 less if it lost with as many
    lengths: Sequence[int]  # next time, in tokens; of those that were cut again: so far
    unchanged: Callable[[int], float]  # whether nothing changes before a token; 1 at 0


def selection_weight(relaunches: Iterable[Relaunch]) -> float:
    """Of a trained group; 0 if it once turned short, 1 if it never lost."""
    weight = 1.0
    for one in relaunches:
        if max(one.lengths) <= one.cut:
            return 0.0
        weight /= stay_probability(one.lengths, one.cut, one.unchanged, _of_the_prompt(one))
    return weight


def _of_the_prompt(relaunch: Relaunch) -> Sequence[int]:
    """What the group says of its prompt. A long response is there as the group would not count
    without; so the longest one is left out, unless no other is long."""
    *others, longest = sorted(relaunch.lengths)
    return others if others and others[-1] > relaunch.cut else [*others, longest]


def stay_probability(
    lengths: Sequence[int], cut: int, unchanged: Callable[[int], float], sample: Sequence[int]
) -> float:
    """That a group of these lengths has a response with more than `cut` tokens again.

    `sample`: lengths of responses to the same prompt, for its survival function; one of them at
    least is longer than the cut.
    """
    ordered = sorted(sample)

    def survivors(tokens: int) -> int:
        return len(ordered) - bisect.bisect_right(ordered, tokens)

    edges = sorted({0, cut, *(n for n in (*ordered, *lengths) if n < cut)})
    short = {0: 0.0}  # by edge: it changes before, and then ends by the cut
    for start, end in pairwise(edges):  # no response of the sample ends between
        changes = unchanged(start) - unchanged(end)
        short[end] = short[start] + changes * (1.0 - survivors(cut) / survivors(start))
    return 1.0 - math.prod(
        short[min(n, cut)] + (unchanged(n) if n <= cut else 0.0) for n in lengths
    )
