"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards teach nothing give way to others.

A group is *flat* when it was given two rewards or more and none of its responses has an advantage:
their rewards are equal. One that the reward service gave up on is not: it is trained with
advantages of zero, as without dynamic sampling. When more groups are flat than the round launched
in excess, the next prompts of the data are launched in their stead, one for one. So a step has P0
groups, unless the data ends, and its loss is still divided by numbers of the settings alone.

A round launches at most max_replacements * P0 prompts in place of others: of the replacements, in
the order of the data, only the first (max_replacements - 1) * P0 give way when they are flat
themselves; the others are trained as they are. So data whose answers are all the same is trained
too, and which groups are kept does not depend on timing.

Which groups are flat is known for certain where a round needs to know it: where all draws are kept,
and ahead of the last winner of a race. Behind it, timing decides whether a loser's rewards are
known when the race ends; so a flat group there is deferred like any loser, and every run of the
same round launches, trains, defers and drops the same draws. Replacements do not race: each has the
place of the group that it stands for, and is trained behind the winners, in launch order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from rollpacker.policy.round_state import Group, GroupState
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, TailBatchingRules
from rollpacker.types import DrawId, RoundKind


class Replacements:
    """How many new prompts a round needs in place of flat groups: a count that only grows.

    One for each flat group that held a place (a protected one, or a replacement), and one for each
    place that the rest cannot fill any more. It does not look at losers, so timing does not count.
    """

    def __init__(self, rules: TailBatchingRules, plan: RoundPlan, launched: int) -> None:
        self.holders = set(plan.protected)  # draws that have a place without racing for it
        self._spare = launched - plan.keep  # entrants of the race beyond its places
        self._flat_holders = 0
        self._flat_racers = 0
        self._asked = 0
        self._giving_way = (rules.max_replacements - 1) * rules.prompts_per_step  # of those added
        self._added = 0
        self._kept: set[DrawId] = set()

    def gives_way(self, draw: DrawId) -> bool:
        """Whether the group of this draw is dropped if it is flat."""
        return draw not in self._kept

    def note_flat(self, draw: DrawId) -> None:
        """A group is flat; told once of each."""
        if draw in self.holders:
            self._flat_holders += 1
        else:
            self._flat_racers += 1

    def note_added(self, draws: Iterable[DrawId]) -> None:
        """Replacements that were launched."""
        for draw in draws:
            self.holders.add(draw)
            self._added += 1
            if self._added > self._giving_way:
                self._kept.add(draw)

    def take_missing(self) -> int:
        """How many more are needed than were asked for until now; from now on they are."""
        needed = self._flat_holders + max(0, self._flat_racers - self._spare)
        missing, self._asked = needed - self._asked, needed
        return missing


def dropped_draws(
    rules: TailBatchingRules,
    plan: RoundPlan,
    groups: Mapping[DrawId, Group],
    holders: Set[DrawId],
) -> set[DrawId]:
    """The flat groups of a finished round that are not deferred; `groups` are in launch order.

    `holders` have a place without racing for it.
    """
    flat = {draw for draw, group in groups.items() if group.state is GroupState.FLAT}
    if plan.kind is not RoundKind.SHORT or rules.race is not RaceKind.TOKENS:
        return flat
    ranks = {
        draw: (group.longest_tokens, place)
        for place, (draw, group) in enumerate(groups.items())
        if draw not in holders
    }
    won = [rank for draw, rank in ranks.items() if groups[draw].state is GroupState.EMITTED]
    last = max(won, default=(0, 0))
    return {draw for draw in flat if draw in holders or ranks[draw] < last}
