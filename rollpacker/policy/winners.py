"""The winners of a round on their way to the trainer: a group is emitted when all are scored.

In a race in tokens they are emitted in the order of the race, so that the trainer sums the same
numbers in the same order whatever the timing; in one of arrival, as their rewards come in.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollpacker.policy.round_state import Group, GroupState
from rollpacker.types import DrawId


class Winners:
    """See the top of the file."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._waiting: dict[DrawId, Group] = {}  # for rewards, in the order of the race
        self._news: list[Group] = []  # it has won, or has its last reward
        self.emitted: list[DrawId] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self.emitted)

    def won(self, group: Group) -> None:
        """It has its place, behind those before."""
        group.state = GroupState.WON
        self._waiting[group.draw.id] = group
        self._news.append(group)

    def scored(self, group: Group) -> None:
        """A winner has its last reward."""
        self._news.append(group)

    def restored(self, group: Group) -> None:
        """It was emitted before a crash."""
        group.state = GroupState.EMITTED
        self.emitted.append(group.draw.id)

    def take(self) -> Iterator[Group]:
        """Those that are to be emitted now."""
        news, self._news = self._news, []
        for group in self._waiting_in_order() if news and self._in_order else news:
            if group.is_scored():
                del self._waiting[group.draw.id]
                group.state = GroupState.EMITTED
                self.emitted.append(group.draw.id)
                yield group

    def _waiting_in_order(self) -> Iterator[Group]:
        """Up to the first without all its rewards."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if not first.is_scored():
                return
            yield first
