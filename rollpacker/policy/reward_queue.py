"""Which finished response goes to the reward service next, where it cannot take all at once.

A response is scored as it finishes, while the service keeps up. When it does not, most of what
waits belongs to groups that will lose the race, and is scored for nothing: a short round launches
up to twice the groups that it keeps. So only as many responses are under way as the service works
on, and the others wait here:

    put --> early, in order of arrival --the group has all its responses--> due, in order of that
              |                                                              |
              +-- the group was let go: never scored        taken first  <---+
              +-- taken when nothing is due

Rewards never decide who is kept (but for flat groups, which are complete), so the order changes no
response, no winner and no advantage. What never happens: `take` leaves a response while there is
room; one of a group that is let go before it is complete, or has lost, is sent from here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from rollpacker.policy.commands import ScoreResponse
from rollpacker.types import DrawId


class RewardQueue:
    """Of one round, before the graders of one kind."""

    def __init__(self, responses_per_prompt: int) -> None:
        self._responses_per_prompt = responses_per_prompt
        self._indices: dict[DrawId, list[int]] = {}  # of each group that is not complete
        self._early: OrderedDict[tuple[DrawId, int], ScoreResponse] = OrderedDict()
        self._due: deque[ScoreResponse] = deque()
        self.under_way = 0

    @property
    def waiting(self) -> int:
        """Responses that have not been taken."""
        return len(self._due) + len(self._early)

    def put(self, command: ScoreResponse) -> None:
        """A response has finished; with the last one of its group, all of them are due."""
        draw = command.draw
        indices = self._indices.setdefault(draw, [])
        indices.append(command.index)
        self._early[draw, command.index] = command
        if len(indices) == self._responses_per_prompt:
            self._due.extend(self._take_off(draw))

    def let_go(self, draw: DrawId) -> None:
        """A group is sampled no further: unless it is complete, it has lost."""
        self._take_off(draw)

    def take(self, room: int, has_lost: Callable[[DrawId], bool]) -> list[ScoreResponse]:
        """What to send now. `room`: responses that the service works on at once; 0: no limit."""
        found: list[ScoreResponse] = []
        while (self._due or self._early) and (not room or self.under_way < room):
            command = self._due.popleft() if self._due else self._early.popitem(last=False)[1]
            if not has_lost(command.draw):
                found.append(command)
                self.under_way += 1
        return found

    def answered(self) -> None:
        """One that was taken has its reward, or none."""
        self.under_way -= 1

    def _take_off(self, draw: DrawId) -> list[ScoreResponse]:
        """Its responses that have not been taken."""
        waiting = (self._early.pop((draw, i), None) for i in self._indices.pop(draw, ()))
        return [command for command in waiting if command is not None]
