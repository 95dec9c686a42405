"""What a simulated run would have trained, had its groups counted by `policy.selection_weights`.

How likely a response is unchanged is taken from the scenario here; a live run would measure it.
The scenario compares each launch with the first one, the weights take that for a change since the
last: behind several deferrals they are not exact, and too large. Of a group that is cut again
before it is past its older cut, the older one is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.policy.selection_weights import Relaunch, selection_weight
from rollpacker.simulation.scenario import Drift, TokenDrift
from rollpacker.simulation.simulator import StepTrace
from rollpacker.types import Draw, DrawId


@dataclass(frozen=True, slots=True)
class WeighedGroup:
    """A trained group."""

    draw: DrawId
    lengths: tuple[int, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class Weighed:
    """A run in numbers."""

    mean_length: float  # of a response, in tokens
    zero_weight_share: float  # of the groups: those with weight 0
    effective_share: float  # groups of weight 1 that would say as much, of all


def weighed_groups(
    steps: Sequence[StepTrace], drift: Drift | TokenDrift, cap: int
) -> list[WeighedGroup]:
    """The trained groups of a run from its first step on, in order; `cap`: of a response."""
    lost: dict[DrawId, tuple[Draw, int]] = {}  # with the cut of the last race
    relaunches: dict[DrawId, list[Relaunch]] = defaultdict(list)
    found: list[WeighedGroup] = []
    for step in steps:
        finish = step.round.finish
        assert finish is not None
        for id_, lengths in step.round.emitted:
            if id_ in lost:
                draw, cut = lost.pop(id_)
                unchanged = drift.unchanged(draw.age(step.step))
                relaunches[id_].append(Relaunch(cut, lengths, unchanged))
            weight = selection_weight(relaunches.pop(id_, ()))
            found.append(WeighedGroup(id_, lengths, weight))
        for item in finish.deferred:
            draw, tokens = item.draw, item.response_tokens
            if draw.id in lost:
                _, cut = lost.pop(draw.id)
                if max(tokens) > cut:
                    unchanged = drift.unchanged(draw.age(step.step))
                    relaunches[draw.id].append(Relaunch(cut, tokens, unchanged))
            now = step.round.cut
            if now is not None and now >= 0:  # below 0: protected draws took all places
                # With just so many tokens it lost by its place; nothing is longer than the cap.
                lost[draw.id] = draw, min(now - (max(tokens) == now), cap - 1)
    return found


def weighed(steps: Sequence[StepTrace], drift: Drift | TokenDrift, cap: int) -> Weighed:
    """See the top of the file."""
    groups = weighed_groups(steps, drift, cap)
    total = sum(group.weight for group in groups)
    tokens = sum(group.weight * sum(group.lengths) for group in groups)
    return Weighed(
        tokens / (total * len(groups[0].lengths)),
        sum(not group.weight for group in groups) / len(groups),
        total**2 / (len(groups) * sum(group.weight**2 for group in groups)),
    )
