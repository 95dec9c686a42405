"""What a simulated run trains, its groups counted by `policy.selection_weights` as a live run does:
how likely a response is unchanged is measured from the rounds before.

The scenario compares each launch with the first one, the weights take that for a change since the
last: behind several deferrals they are near, not exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollpacker.policy.ladder_memory import LadderMemory, remembered, selection_at
from rollpacker.policy.selection_weights import Selection, WeighedSums
from rollpacker.simulation.simulator import StepTrace
from rollpacker.simulation.steering import round_seen
from rollpacker.types import DrawId, LostRace


@dataclass(frozen=True, slots=True)
class WeighedGroup:
    """A trained group."""

    draw: DrawId
    lengths: tuple[int, ...]  # of its responses, in tokens
    weight: float


def weighed_groups(steps: Sequence[StepTrace], *, always: bool = True) -> Iterator[WeighedGroup]:
    """The trained groups of a run from its first step on, in order; `always`: as if its rules
    weighed them, whether they do or not."""
    lost: dict[DrawId, LostRace] = {}
    memory = LadderMemory()
    for step in steps:
        finish = step.round.finish
        assert finish is not None
        came = [*(draw for draw, _ in step.round.emitted), *(i.draw.id for i in finish.deferred)]
        if any(draw in lost for draw in came):
            selection = selection_at(memory, step.step, lost)
        else:  # no weight goes by how responses change, which takes a while to find
            selection = Selection(step.step, lost, None)
        for draw, lengths in step.round.emitted:
            weighs = always or step.selection_weights
            yield WeighedGroup(draw, lengths, selection.weight(draw, lengths) if weighs else 1.0)
        deferred = selection.after_race(finish.deferred, finish.cuts)
        lost |= {item.draw.id: item.lost for item in deferred if item.lost is not None}
        memory = remembered(memory, round_seen(step))


def weighed(steps: Sequence[StepTrace], *, always: bool = True) -> WeighedSums:
    """Sums over them all."""
    sums = WeighedSums()
    for group in weighed_groups(steps, always=always):
        sums = sums.plus(group.weight, group.lengths)
    return sums
