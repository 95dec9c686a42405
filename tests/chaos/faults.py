"""What goes wrong, and when: a schedule of faults that a seed decides. Pure.

A fault hits one process at one moment of a run (read from the run's own progress, so that a
schedule means the same on any machine): it is killed, stopped for a while, or cut off. Every pair
of a kind and a target comes before any pair comes again. Some faults come while the one before
still lasts.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.integration.real_runs import OUTCOME, RESULT, Moment

LAST_STEPS = 4  # of a run, in which no fault begins: each is to be recovered from
_TOGETHER = 0.25  # share of the faults that do not wait for the end of the one before


class FaultKind(enum.Enum):
    """How a process fails."""

    KILL = "kill"  # SIGKILL; its supervisor starts it again
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    REFUSE = "refuse"  # its connections are reset and new ones refused
    SILENCE = "silence"  # its connections carry nothing


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    kind: FaultKind
    target: str  # a process of the stack; "rank-N" is a rank of the trainer
    moment: Moment  # begins there, or at once when the run is past it
    delay_seconds: float  # from the moment on: into what follows it
    seconds: float  # how long it lasts, 0 for a kill
    together: bool  # begins while the fault before may still last


def schedule(
    seed: int, count: int, *, steps: int, groups: int, targets: Sequence[str], seconds: float = 5.0
) -> list[Fault]:
    """`count` faults over the steps of a run, in order of their moments.

    `groups`: of a step. `seconds`: how long what is not a kill lasts. Raises ValueError where the
    run is too short to hold a fault.
    """
    if steps <= LAST_STEPS:
        raise ValueError(f"steps is {steps}: faults need a run of more than {LAST_STEPS} steps")
    noise = random.Random(seed)
    stages = [*range(groups + 1), OUTCOME, RESULT]
    moments = sorted(
        Moment(noise.randrange(steps - LAST_STEPS), noise.choice(stages)) for _ in range(count)
    )
    return [
        Fault(
            kind=kind,
            target=target,
            moment=moment,
            delay_seconds=noise.uniform(0, 0.2),
            seconds=0.0 if kind is FaultKind.KILL else seconds,
            together=noise.random() < _TOGETHER,
        )
        for moment, (kind, target) in zip(moments, _pairs(noise, targets), strict=False)
    ]


def _pairs(noise: random.Random, targets: Sequence[str]) -> Iterator[tuple[FaultKind, str]]:
    """Kinds and targets, endlessly, every pair equally often."""
    pairs = [
        (kind, target)
        for kind, target in itertools.product(FaultKind, targets)
        if not (target.startswith("rank-") and kind in (FaultKind.REFUSE, FaultKind.SILENCE))
    ]
    while True:
        yield from noise.sample(pairs, len(pairs))
