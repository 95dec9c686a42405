"""Which ladder the next rounds climb, and how large an engine is at each level.

Chosen of all ladders of the usual factors is the one with the most trained tokens per second among
those whose oldest draw fits `max_deferral_age` and whose trained mean length stays within
`length_tolerance` of the uncensored one (`ladder_forecast` says what to expect of each). A change
must pay: the present ladder stays unless another is better by `min_gain`, or it is not allowed
itself. While the tail is a guess, only that is a reason: a guess is too short, so it errs towards
deferring less. What is not known well counts against a change too: of many candidates, the one that
looks best is often one whose edge of never-ending responses looks luckiest.

Levels differ in what limits them: the last ones hold few and long responses, whose KV has to fit,
the first ones many short ones, which want many replicas. So each level may have a tensor-parallel
size of its own; the rounds of a level are the same at any size, and only their time differs.

What never happens: a choice from anything but the arguments; a factor outside (1, 2].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rollpacker.policy.group_law import GroupLaw, ObservedGroup
from rollpacker.policy.ladder_forecast import (
    EngineMeasure,
    Forecast,
    PlannerRules,
    forecast,
    level_rounds,
)

_CAUTION = 0.5  # standard errors against every other ladder than the present one
_FACTORS = (1.25, 1.5, 1.75, 2.0)
_ALONE = (4 / 3,)  # of a single level: its rounds leave nothing waiting, so draws stay young


@dataclass(frozen=True, slots=True)
class LadderChoice:
    """The ladder to climb, and why in one line for the event log."""

    factors: tuple[float, ...]
    reason: str


def choose_ladder(
    rules: PlannerRules,
    engine: EngineMeasure,
    groups: Sequence[ObservedGroup],
    present: tuple[float, ...],
) -> LadderChoice:
    """The ladder for the next rounds; the present one while too little has been seen."""
    if sum(group.complete for group in groups) < rules.min_groups:
        return LadderChoice(
            present, f"keeps {ladder_name(present)}: {len(groups)} groups seen so far"
        )
    law = GroupLaw(groups, rules.max_response_tokens)
    now = forecast(rules, engine, law, present)
    is_guess = law.stand_in > rules.max_stand_in and law.keys[-1] < rules.max_response_tokens
    if is_guess and _allowed(rules, now):
        return LadderChoice(
            present,
            f"keeps {ladder_name(present)}: the longest group that was seen whole stands for"
            f" {law.stand_in:.0f}, so the tail is a guess",
        )
    others = [
        forecast(rules, engine, law, factors, 0.0 if factors == present else _CAUTION)
        for factors in _candidates(rules)
    ]
    allowed = [other for other in others if _allowed(rules, other)]
    best = max(allowed, key=lambda item: item.tokens_per_second)
    gain = _gain(engine, now, best)
    if _allowed(rules, now) and gain < rules.min_gain:
        return LadderChoice(present, f"keeps {_describe(now)}: the best other saves {gain:.1%}")
    return LadderChoice(
        best.factors, f"takes {_describe(best)} instead of {_describe(now)}: {len(groups)} groups"
    )


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """The tensor-parallel size of each level, and why in one line for the event log."""

    sizes: tuple[int, ...]
    reason: str


def choose_sizes(
    rules: PlannerRules,
    engines: Mapping[int, EngineMeasure],
    groups: Sequence[ObservedGroup],
    factors: tuple[float, ...],
    present: tuple[int, ...],
) -> SizeChoice:
    """A size for each level of a ladder; `engines`: the same GPUs at each size that is to be had.

    A level keeps its present size unless another saves `min_gain` of its seconds.
    """
    law = GroupLaw(groups, rules.max_response_tokens)
    sizes, reasons = [], []
    for level, item in enumerate(level_rounds(rules, law, factors)):
        seconds = {size: item.seconds(rules, engine, law) for size, engine in engines.items()}
        size, now = min(seconds, key=seconds.__getitem__), present[level]
        if seconds[now] <= seconds[size] * (1.0 + rules.min_gain):
            size = now
        sizes.append(size)
        saves = f", {seconds[now]:.3g} s at {now}" if size != now else ""
        reasons.append(f"level {level}: {size} ({seconds[size]:.3g} s a round{saves})")
    return SizeChoice(tuple(sizes), f"tensor-parallel size of {'; '.join(reasons)}")


def _candidates(rules: PlannerRules) -> list[tuple[float, ...]]:
    """Every ladder of the usual factors; no deferral is one of them, and always allowed."""
    usual = [
        factors
        for levels in range(rules.max_levels + 1)
        for factors in product(_FACTORS, repeat=levels)
    ]
    return usual + [(factor,) for factor in _ALONE if rules.max_levels]


def _gain(engine: EngineMeasure, now: Forecast, best: Forecast) -> float:
    """What the best ladder saves of the rollout's seconds, for as many trained tokens.

    Not of the whole step's: what a change costs, the queue that it leaves, is rollout too.
    """
    step = now.rollout_seconds + engine.other_seconds
    saved = step * (1.0 - now.tokens_per_second / best.tokens_per_second)
    return saved / now.rollout_seconds


def _allowed(rules: PlannerRules, item: Forecast) -> bool:
    return (
        item.max_age <= rules.max_deferral_age
        and abs(item.length_ratio - 1.0) <= rules.length_tolerance
    )


def ladder_name(factors: tuple[float, ...]) -> str:
    """For people."""
    return "no deferral" if not factors else "eta " + ", ".join(f"{f:g}" for f in factors)


def _describe(item: Forecast) -> str:
    return (
        f"{ladder_name(item.factors)} ({item.rollout_seconds:.3g} s a round,"
        f" trained length x{item.length_ratio:.3f}, oldest draw {item.max_age:.0f} steps)"
    )
