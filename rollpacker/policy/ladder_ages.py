"""The rounds of a ladder, counted out: which level follows which, and how old its draws are.

Which level runs next depends on how many draws wait, not on how long they are
(`tail_batching.plan`), so the rounds of a ladder are known in advance: here they are counted out,
from an empty queue on. Of the draws of a round, those of every age lose alike.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

_LAST_ROUNDS = 4  # of the last level
_MOST_STEPS = 200  # counted out, however rarely the last level runs

Ages = Mapping[float, float]  # steps since the first launch -> share of the launched draws


@lru_cache(maxsize=1024)
def level_ages(factors: tuple[float, ...], prompts_per_step: int) -> tuple[Ages, ...]:
    """The ages of each level, 0 first; infinite where a level does not run in 200 steps."""
    return _counted_out(factors, prompts_per_step)[0]


def oldest_draw(factors: tuple[float, ...], prompts_per_step: int) -> float:
    """The greatest age at which a draw of the ladder is launched, in steps."""
    return max(max(ages) for ages in level_ages(factors, prompts_per_step))


@lru_cache(maxsize=1024)
def level_changes(
    factors: tuple[float, ...], prompts_per_step: int
) -> Mapping[tuple[int, int], float]:
    """(a level, the level of the next round, another one) -> share of all rounds."""
    levels = _counted_out(factors, prompts_per_step)[1]
    counts = Counter((a, b) for a, b in pairwise(levels) if a != b)
    return {change: count / (len(levels) - 1) for change, count in counts.items()}


@lru_cache(maxsize=1024)
def _counted_out(
    factors: tuple[float, ...], prompts_per_step: int
) -> tuple[tuple[Ages, ...], tuple[int, ...]]:
    """The ages of each level, and the levels of the rounds."""
    last = len(factors)
    launched = [math.ceil(round(factor * prompts_per_step, 9)) for factor in (*factors, 1.0)]
    queues: list[deque[tuple[int, float]]] = [deque() for _ in launched]  # first step, draws
    counts = [0] * (last + 1)  # of the draws of each queue, exact
    seen: list[dict[float, float]] = [{} for _ in launched]
    levels: list[int] = []
    for step in range(_MOST_STEPS):
        level = next((n for n in range(last, 0, -1) if counts[n] >= launched[n]), 0)
        levels.append(level)
        size = launched[level]
        draws = _taken(queues[level], size) if level else [(step, float(size))]
        for first, count in draws:
            age = step - first
            seen[level][age] = seen[level].get(age, 0.0) + count
        if levels.count(last) == _LAST_ROUNDS:
            break
        counts[level] -= size if level else 0
        if level < last:
            lost = size - prompts_per_step
            counts[level + 1] += lost
            queues[level + 1] += [(first, count * lost / size) for first, count in draws]
    return tuple(_shares(ages) for ages in seen), tuple(levels)


def _taken(queue: deque[tuple[int, float]], size: float) -> list[tuple[int, float]]:
    """So many draws, off the front of a queue."""
    draws: list[tuple[int, float]] = []
    while queue and size > 1e-9:
        first, count = queue.popleft()
        draws.append((first, min(count, size)))
        if count > size:
            queue.appendleft((first, count - size))
        size -= count
    return draws


def _shares(ages: Mapping[float, float]) -> Ages:
    total = sum(ages.values())
    return {age: count / total for age, count in ages.items()} if total else {math.inf: 1.0}
