"""How long the replicas of a round decode, by the tokens that its longest running response has.

responses of the launched groups --GroupLaw--> running behind each point of the grid, by replica
seconds of a decode step, KV capacity ----------------------------------------> seconds up to it
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import mul
from statistics import NormalDist, fmean

from rollpacker.policy.group_law import GroupLaw

Pool = tuple[float, ...]  # what a level launches: the share of each bin of the law


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """Measured speed of the rollout engines of one tensor-parallel size, together."""

    replicas: int
    base_seconds: float  # of a decode step
    per_sequence_seconds: float  # and running response beyond the free ones
    per_kv_token_seconds: float  # and token in the KV cache
    kv_capacity: int  # tokens per replica
    prompt_tokens: int
    free_sequences: int = 0
    other_seconds: float = 0.0  # of a step, behind its rewards, that no ladder changes

    def step_seconds(self, running: float, kv_tokens: float) -> float:
        """One token for each of `running` responses of a replica, which fit its KV cache."""
        return (
            self.base_seconds
            + self.per_sequence_seconds * max(0.0, running - self.free_sequences)
            + self.per_kv_token_seconds * kv_tokens
        )


@lru_cache(maxsize=512)  # ladders that begin alike share their first rounds
def decode_profile(
    engine: EngineMeasure, law: GroupLaw, groups: float, pool: Pool, start: float
) -> list[float]:
    """Seconds until all that still runs has as many tokens as each point of the grid, on average.

    `groups`: of a replica. The fullest replica ends a round; groups are spread evenly over them,
    long responses are not: how many of them it has varies from round to round.
    """
    running = []  # mean of a replica, and standard deviation, behind each point of the grid
    for by_bin, squared_by_bin in zip(law.alive, law.alive_squared, strict=True):
        alive = sum(map(mul, pool, by_bin))
        squared = sum(map(mul, pool, squared_by_bin))
        running.append((groups * alive, math.sqrt(groups * max(0.0, squared - alive**2))))
    cases = [
        _replica_seconds(engine, law.grid, [m + full * d for m, d in running], start)
        for full in _fullest(engine.replicas)
    ]
    return [fmean(seconds) for seconds in zip(*cases, strict=True)]


def _replica_seconds(
    engine: EngineMeasure, grid: Sequence[float], running: list[float], start: float
) -> list[float]:
    """From `start` to each point of the grid, with so many responses running behind each.

    What does not fit the KV cache waits, and makes its tokens up when there is room. Where there is
    none before the end, as with responses that never stop, the others end first.
    """
    seconds, late, found = 0.0, 0.0, [0.0]
    for (first, last), count in zip(pairwise(grid), running, strict=True):
        made = last - max(first, start)
        if made > 0.0:
            tokens = engine.prompt_tokens + (last + max(first, start)) / 2.0
            fits = max(1.0, engine.kv_capacity / tokens)
            fitting = min(count, fits)
            seconds += made * engine.step_seconds(fitting, fitting * tokens)
            if count <= fits:
                late = 0.0  # there was room before the end
            else:
                waiting, waves = min(count - fits, fits), math.ceil(count / fits) - 1
                late += made * waves * engine.step_seconds(waiting, waiting * tokens)
        found.append(seconds + late)
    return found


@lru_cache(maxsize=64)
def _fullest(count: int) -> tuple[float, ...]:
    """The greatest of so many standard normal numbers, in equally likely cases."""
    return tuple(NormalDist().inv_cdf(((n + 0.5) / 8) ** (1.0 / count)) for n in range(8))


def interpolated(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Read between points, linearly."""
    place = min(max(bisect.bisect_right(points, at) - 1, 0), len(points) - 2)
    width = points[place + 1] - points[place]
    part = min(1.0, (at - points[place]) / width) if width > 0.0 else 0.0
    return values[place] + (values[place + 1] - values[place]) * part
