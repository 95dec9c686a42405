"""Rounds that `search` tries and the coordinator does not run: the same machine, one rule changed.

`ProbingRound`: one response of each group runs first; the others follow when it has finished, so a
group whose first response is long costs one response, not all of them, until the race is decided.

`CappedRound`: in a short round a group that passes the cap of its level loses at once, and the step
takes the groups that are below it, at most P0. Winners are still a function of the responses alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.policy.commands import Command
from rollpacker.policy.events import ResponseFinished
from rollpacker.policy.race import TokenRace
from rollpacker.policy.round import Round
from rollpacker.policy.round_state import Group, GroupState
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.types import Draw, DrawId, RoundKind

_UNDECIDED = (GroupState.WAITING, GroupState.RUNNING, GroupState.COMPLETE)
_BEHIND_ALL = 1 << 62  # launch order


class ProbingRound(Round):
    """See the top of the file."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._probed: set[DrawId] = set()

    def _to_launch(self, group: Group) -> tuple[int, ...]:
        return group.missing() if group.draw.id in self._probed else group.missing()[:1]

    def _finished(self, event: ResponseFinished) -> list[Command]:
        commands = super()._finished(event)
        group = self._groups[event.draw]
        if event.draw not in self._probed and group.state is GroupState.RUNNING:
            self._replicas[group.replica_id].running.discard(event.draw)
            group.state = GroupState.WAITING
            group.end_launch()
            self._waiting.append(event.draw)
        self._probed.add(event.draw)
        return commands


class CappedRound(Round):
    """See the top of the file."""

    def __init__(
        self,
        rules: TailBatchingRules,
        plan: RoundPlan,
        draws: Sequence[Draw],
        expected_tokens: Mapping[DrawId, int] | None = None,
        *,
        caps: Sequence[int] = (),
    ) -> None:
        """`caps`: tokens, of the levels from 0 on; levels without one race as ever."""
        super().__init__(rules, plan, draws, expected_tokens)
        self._is_capped = plan.kind is RoundKind.SHORT and plan.level < len(caps)
        if self._is_capped:
            ids = [draw.id for draw in draws]
            self._race = _CappedRace(ids, plan.keep, plan.protected, caps[plan.level])

    def _settle(self, at: float) -> list[Command]:
        commands = super()._settle(at)
        if self._is_capped and self._decided_at is None:
            groups = self._groups.values()
            if not any(group.state in _UNDECIDED for group in groups):
                self._keep = len(self._ranked) + len(self._emitted)
                self._decided_at = at
        return commands


class _CappedRace(TokenRace):
    """A race in tokens in which nobody wins a place at the cap."""

    def __init__(
        self, entrants: Sequence[DrawId], places: int, protected: frozenset[DrawId], cap: int
    ) -> None:
        super().__init__(entrants, places, protected)
        self._complete_ranks = [(cap, _BEHIND_ALL)] * max(0, self._free_places)
