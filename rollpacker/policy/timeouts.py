"""The adaptive time limit of a test case (paper, section 4.3).

limit = min(max(T_min, lambda * T_anchor), T_max), where T_anchor is the largest CPU time of a
*correct* run of that test case so far. Without an anchor the limit is T_max.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeoutRules:
    """Bounds of the time limit."""

    min_seconds: float = 2.0  # T_min
    max_seconds: float = 30.0  # T_max
    relaxation: float = 1.5  # lambda, `timeout_relaxation`


def time_limit(rules: TimeoutRules, anchor_seconds: float | None) -> float:
    """Seconds that a run of the test case may take."""
    if anchor_seconds is None:
        return rules.max_seconds
    return min(max(rules.min_seconds, rules.relaxation * anchor_seconds), rules.max_seconds)


def next_anchor(anchor_seconds: float | None, cpu_seconds: float, *, correct: bool) -> float | None:
    """The anchor after a run: it only grows, and only by correct runs."""
    if not correct:
        return anchor_seconds
    return cpu_seconds if anchor_seconds is None else max(anchor_seconds, cpu_seconds)
