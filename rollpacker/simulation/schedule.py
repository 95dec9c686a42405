"""How the rounds of a run are laid over the replicas: everything that is not in the rules.

A `Schedule` is a value; the default is what `paper` and `compare` run. `search` tries others: each
idea is one field here, or one other field of the scenario.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollpacker.simulation.workload import TASKS, RecordedWorkload, Workload

_OTHER_EPOCH = 1000  # number of a launch that no run reaches: the same prompt, other noise
_SAMPLE = 512  # draws


@dataclass(frozen=True, slots=True)
class Launched:
    """A draw that is about to be launched, and what a predictor may look at."""

    workload: Workload | RecordedWorkload
    number: int
    so_far: int  # tokens of its longest response when it was deferred; 0: new
    lengths: Sequence[int]  # what it will need: for bounds of what a predictor could gain


Predictor = Callable[[Launched], float]  # tokens of one of its responses; 0: no idea


@dataclass(frozen=True, slots=True)
class Schedule:
    """See the top of the file."""

    predictor: Predictor | None = None  # groups are placed by it, when all replicas are there
    spreads_groups: bool = False  # the responses of a group go to different replicas, in turn
    complete_first: bool = False  # scored are groups that are complete, before others
    rebalances: bool = False  # an idle replica takes a group over (`policy.rebalance`)
    releases: int = 1  # of replicas to training, at most so many per round
    releases_by_cap: bool = False  # when the others could hold what runs at the cap
    releases_idle: bool = False  # only replicas that run nothing, as they become idle
    bubble_acceptance: Callable[[int], float] | None = None  # see `bubbles`; by age in steps


PLAIN = Schedule()
REBALANCED = Schedule(complete_first=True, rebalances=True)  # what a live run in mode auto does
TRAINING_IDLE = Schedule(complete_first=True, rebalances=True, releases=1 << 20, releases_idle=True)
SPREAD = Schedule(spreads_groups=True)
AS_PUBLISHED = Schedule(spreads_groups=True, releases_by_cap=True)  # our reading of the paper


def deferred_tokens(launched: Launched) -> float:
    """What a deferred draw had; nothing is known of new ones."""
    return launched.so_far


def earlier_epoch(launched: Launched) -> float:
    """The mean of the same prompt's responses an epoch ago, under weights that are long gone."""
    lengths = launched.workload.lengths(launched.number, 0.0, _OTHER_EPOCH)
    return max(launched.so_far, fmean(lengths))


def prompt_features(launched: Launched) -> float:
    """What a look at the prompt tells: its task, and the mean length of that."""
    workload = launched.workload
    assert isinstance(workload, Workload)
    task = TASKS.index(workload.task(launched.number))
    rows = workload.first_lengths[:_SAMPLE][workload.tasks[:_SAMPLE] == task]
    return max(launched.so_far, float(rows.mean()) if rows.size else 0.0)


def true_lengths(launched: Launched) -> float:
    """The mean of what will come out: more than any predictor can know."""
    return fmean(launched.lengths)
