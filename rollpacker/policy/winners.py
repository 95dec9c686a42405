"""The winners of a round on their way to the trainer: a group is emitted when all are scored.

In a race in tokens they are emitted in the order of the race, so that the trainer sums the same
numbers in the same order whatever the timing; in one of arrival, as their rewards come in.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from rollpacker.policy.round_state import Group, GroupState
from rollpacker.types import DrawId


class Winners:
    """See the top of the file."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        # For rewards, in the order of the race. (A plain dict would walk over all that has left.)
        self._waiting: OrderedDict[DrawId, Group] = OrderedDict()
        self._news: list[Group] = []  # it has won, or has its last reward
        self.emitted: list[DrawId] = []
        self.count = 0  # emitted ones included

    def won(self, group: Group) -> None:
        """It has its place, behind those before."""
        group.state = GroupState.WON
        self.count += 1
        self._waiting[group.draw.id] = group
        self._news.append(group)

    def scored(self, group: Group) -> None:
        """A winner has its last reward."""
        self._news.append(group)

    def restored(self, group: Group) -> None:
        """It was emitted before a crash."""
        group.state = GroupState.EMITTED
        self.count += 1
        self.emitted.append(group.draw.id)

    def take(self) -> list[Group]:
        """Those that are to be emitted now."""
        if not self._news:
            return []
        if self._in_order:
            ready = list(itertools.takewhile(Group.is_scored, self._waiting.values()))
        else:
            ready = [group for group in self._news if group.is_scored()]
        self._news.clear()
        for group in ready:
            del self._waiting[group.draw.id]
            group.state = GroupState.EMITTED
            self.emitted.append(group.draw.id)
        return ready
