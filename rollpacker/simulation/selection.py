"""What a simulated run would have trained, had its groups counted by `policy.selection_weights`.

How likely a response is unchanged is taken from the scenario here; a live run would measure it.
The scenario compares each launch with the first one, the weights take that for a change since the
last: behind several deferrals they are not exact, and too large. Of a group that is cut again
before it is past its older cut, the older one is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.policy.selection_weights import Relaunch, selection_weight
from rollpacker.simulation.scenario import Drift, TokenDrift
from rollpacker.simulation.simulator import StepTrace
from rollpacker.types import DrawId


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
    dropped_share: float  # of the groups: those with weight 0
    effective_share: float  # groups of weight 1 that would say as much, of all


def weighed_groups(steps: Sequence[StepTrace], drift: Drift | TokenDrift) -> list[WeighedGroup]:
    """The trained groups of a run from its first step on, in order."""
    lost: dict[DrawId, int] = {}  # tokens than which it had more when it lost its last race
    first: dict[DrawId, int] = {}  # step of the first launch
    relaunches: dict[DrawId, list[Relaunch]] = {}
    found: list[WeighedGroup] = []
    for step in steps:
        finish = step.round.finish
        assert finish is not None

        def came_again(
            draw: DrawId, lengths: Sequence[int], ended: bool, now: int = step.step
        ) -> None:
            cut = lost.pop(draw, None)
            if cut is None or not (ended or max(lengths) > cut):  # else: cut before it was known
                return
            unchanged = drift.unchanged(now - first[draw])
            relaunches.setdefault(draw, []).append(Relaunch(cut, tuple(lengths), unchanged))

        for draw, lengths in step.round.emitted:
            came_again(draw, lengths, True)
            weight = selection_weight(relaunches.pop(draw, ()))
            found.append(WeighedGroup(draw, lengths, weight))
        for item in finish.deferred:
            draw = item.draw.id
            came_again(draw, item.response_tokens, False)
            first[draw] = item.draw.first_step
            cut = step.round.cut  # below 0: protected draws took all places
            if cut is not None and cut >= 0:
                # A complete one may have lost with just so many tokens, by its place.
                was_complete = all(item.finished)
                lost[draw] = min(cut, max(item.response_tokens) - 1) if was_complete else cut
    return found


def weighed(steps: Sequence[StepTrace], drift: Drift | TokenDrift) -> Weighed:
    """See the top of the file."""
    groups = weighed_groups(steps, drift)
    total = sum(group.weight for group in groups)
    tokens = sum(group.weight * sum(group.lengths) for group in groups)
    return Weighed(
        tokens / (total * len(groups[0].lengths)),
        sum(not group.weight for group in groups) / len(groups),
        total**2 / (len(groups) * sum(group.weight**2 for group in groups)),
    )
