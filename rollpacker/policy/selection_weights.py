"""How much a trained group counts, so that deferral does not select by length.

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
each other and of what the tokens say. S is taken from the group's own responses, which are few, and
those of all prompts beside them, so what comes out is near. u is measured (`response_drift`).
Groups that lose several races have a weight from each; a cut that is lower than one before selects
no further (decision 44).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rollpacker.policy.response_drift import Unchanged
from rollpacker.types import DeferredDraw, DrawId, LostRace

# Of eight responses to a prompt often one is long, and it alone would say that all that get far get
# past the cut: up to 8 % of the length are missing then. More of the others, and it is too much.
_OTHERS_COUNT = 2


@dataclass(frozen=True, slots=True)
class Selection:
    """What is known at the start of a step of the draws that it may launch."""

    step: int
    lost: Mapping[DrawId, LostRace]  # by those that have lost a race
    unchanged: Unchanged | None  # as it was measured in earlier steps; None: too little was seen
    lengths: Sequence[int] = ()  # of responses to any prompt, in tokens, sorted

    def weight(self, draw: DrawId, lengths: Sequence[int]) -> float:
        """Of a group that the step trains, with responses of these lengths in tokens: 0 if it has
        turned short, 1 if it never lost, or nothing is known of how responses change."""
        lost = self.lost.get(draw)
        if lost is None or self.unchanged is None:
            return 1.0
        return lost.weight * self._factor(lost, lengths) if max(lengths) > lost.cut else 0.0

    def after_race(
        self, deferred: Sequence[DeferredDraw], cuts: Sequence[int]
    ) -> tuple[DeferredDraw, ...]:
        """The draws that the step's race has deferred, with what that says of them.

        `cuts`: of each, what its longest response has more tokens than; empty: the race did not go
        by length.
        """
        if not cuts:
            return tuple(replace(item, lost=self.lost.get(item.draw.id)) for item in deferred)
        return tuple(
            replace(item, lost=self._lost(item, cut))
            for item, cut in zip(deferred, cuts, strict=True)
        )

    def _lost(self, item: DeferredDraw, cut: int) -> LostRace:
        before = self.lost.get(item.draw.id)
        if before is None:
            return LostRace(cut, self.step)
        if not any(item.response_tokens):  # it was not launched: behind a crash, for one
            return before
        if max(cut, max(item.response_tokens) - 1) < before.cut:  # so far not longer than then
            has_turned_short = all(item.finished)
            return replace(before, weight=0.0) if has_turned_short else before  # else: not known
        lengths = [
            tokens if ended else max(tokens, before.cut + 1)
            for tokens, ended in zip(item.response_tokens, item.finished, strict=True)
        ]
        weight = before.weight * self._factor(before, lengths)
        return LostRace(max(cut, before.cut), self.step, weight)

    def _factor(self, lost: LostRace, lengths: Sequence[int]) -> float:
        """1 / P of a group that stays."""
        law = self.unchanged
        if law is None:
            return 1.0

        def unchanged(tokens: int) -> float:
            return law(self.step - lost.step, tokens) if tokens else 1.0

        sample = _of_the_prompt(lengths, lost.cut)
        return 1.0 / stay_probability(lengths, lost.cut, unchanged, sample, self.lengths)


def _of_the_prompt(lengths: Sequence[int], cut: int) -> Sequence[int]:
    """What the group says of its prompt. A long response is there as the group would not count
    without; so the longest one is left out, unless no other is long."""
    *others, longest = sorted(lengths)
    return others if others and others[-1] > cut else [*others, longest]


def stay_probability(
    lengths: Sequence[int],
    cut: int,
    unchanged: Callable[[int], float],
    sample: Sequence[int],
    others: Sequence[int] = (),
) -> float:
    """That a group of these lengths has a response with more than `cut` tokens again.

    `sample`: lengths of responses to the same prompt, for its survival function; one of them at
    least is longer than the cut. `others`: to any prompt, sorted; wherever a response changes, they
    count as `_OTHERS_COUNT` that have got as far.
    """
    own = sorted(sample)

    def gets_past_the_cut(tokens: int) -> float:
        """S(cut) / S(tokens)."""
        reach, stay = _longer(own, tokens), _longer(own, cut)
        others_reach = _longer(others, tokens)
        if not others_reach:
            return stay / reach
        others_share = _longer(others, cut) / others_reach
        return (stay + _OTHERS_COUNT * others_share) / (reach + _OTHERS_COUNT)

    edges = sorted({0, cut, *(n for n in (*own, *lengths) if n < cut)})
    short = {0: 0.0}  # by edge: it changes before, and then ends by the cut
    for start, end in pairwise(edges):  # no response of the sample ends between
        changes = unchanged(start) - unchanged(end)
        short[end] = short[start] + changes * (1.0 - gets_past_the_cut(start))
    return 1.0 - math.prod(
        short[min(n, cut)] + (unchanged(n) if n <= cut else 0.0) for n in lengths
    )


def _longer(ordered: Sequence[int], tokens: int) -> int:
    """How many are longer than so many tokens."""
    return len(ordered) - bisect.bisect_right(ordered, tokens)


@dataclass(frozen=True, slots=True)
class WeighedSums:
    """Of the trained groups of a run."""

    groups: float = 0.0
    zero_weight_groups: float = 0.0
    weights: float = 0.0
    squared_weights: float = 0.0
    responses: float = 0.0  # each counted by its group's weight
    tokens: float = 0.0  # likewise

    def plus(self, weight: float, lengths: Sequence[int]) -> WeighedSums:
        """With one more group, whose responses have these lengths in tokens."""
        return WeighedSums(
            self.groups + 1.0,
            self.zero_weight_groups + (weight == 0.0),
            self.weights + weight,
            self.squared_weights + weight**2,
            self.responses + weight * len(lengths),
            self.tokens + weight * sum(lengths),
        )

    @property
    def mean_length(self) -> float:
        """Of a response, in tokens; 0 where there is none."""
        return self.tokens / self.responses if self.responses else 0.0

    @property
    def mean_weight(self) -> float:
        """Of a group: about 1, if responses change as they are foretold to; 1 where none is."""
        return self.weights / self.groups if self.groups else 1.0

    @property
    def zero_weight_share(self) -> float:
        """Of the groups."""
        return self.zero_weight_groups / self.groups if self.groups else 0.0

    @property
    def effective_share(self) -> float:
        """Groups of weight 1 that would say as much, of all (Kish's effective sample size)."""
        if not self.squared_weights:
            return 1.0
        return self.weights**2 / (self.groups * self.squared_weights)
