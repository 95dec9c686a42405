"""What a finished round leaves: winners, draws one level up, tokens and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.flat_groups import dropped_draws
from rollpacker.policy.round_state import Group, GroupState
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.types import DeferredDraw, Draw, DrawId


@dataclass(slots=True)
class RoundTimes:
    """When things happened, on the clock of the events; None: not yet."""

    first: float | None = None  # event
    filled: float | None = None  # enough groups complete to fill the step
    decided: float | None = None  # all winners are known

    def of_rollout(self, end: float) -> tuple[float, float]:
        """Seconds of the rollout, and how many of them the race was waited for."""
        start = end if self.first is None else self.first
        decided = end if self.decided is None else self.decided
        filled = decided if self.filled is None else self.filled
        return decided - start, max(0.0, decided - filled)


def finish_round(
    rules: TailBatchingRules,
    plan: RoundPlan,
    groups: Mapping[DrawId, Group],
    emitted: Sequence[DrawId],
    place_holders: Set[DrawId],
    cut_of: Callable[[DrawId], int | None],
    times: RoundTimes,
    at: float,
) -> FinishRound:
    """`groups` are in launch order; `place_holders` have a place without racing for it; `cut_of`:
    what a loser of the race has more tokens than, None: it did not go by length."""
    flat = dropped_draws(rules, plan, groups, place_holders)
    lost = [
        group
        for draw, group in groups.items()
        if group.state is not GroupState.EMITTED and draw not in flat
    ]
    cuts = [cut_of(group.draw.id) for group in lost]
    rollout_seconds, race_wait_seconds = times.of_rollout(at)
    return FinishRound(
        winners=tuple(emitted),
        deferred=tuple(_deferred(rules, group) for group in lost),
        generated_tokens=sum(group.decoded for group in groups.values()),
        rollout_seconds=rollout_seconds,
        race_wait_seconds=race_wait_seconds,
        flat=tuple(draw for draw in groups if draw in flat),
        cut_tokens=tuple(tokens for draw in emitted for tokens in groups[draw].cut_tokens),
        cuts=tuple(cut for cut in cuts if cut is not None),  # of all losers, or of none
    )


def _deferred(rules: TailBatchingRules, group: Group) -> DeferredDraw:
    """The draw one level up."""
    old = group.draw
    level = min(old.level + 1, rules.levels)
    so_far = group.tokens_so_far()
    kept = range(rules.responses_per_prompt)
    return DeferredDraw(
        draw=Draw(old.epoch, old.prompt_id, old.seeds, level, old.first_step),
        response_tokens=tuple(group.finished.get(index, so_far) for index in kept),
        finished=tuple(index in group.finished for index in kept),
    )
