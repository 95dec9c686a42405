"""Which ladder the next rounds climb, and how large an engine is at each level.

Chosen of all ladders of the usual factors, each with the best tensor-parallel sizes that are to be
had, and with or without selection weights where these are the run's to choose, is the one with the
most trained tokens per second among those whose oldest draw fits `max_deferral_age` and whose
trained mean length stays within `length_tolerance` of the uncensored one (`ladder_forecast` says
what to expect of each, doubt included). Where rewards decide how long rounds are, many ladders are
equal, and of these it is the one that decodes least. A change must pay: the present ladder stays
unless another is better by `min_gain`, or it is not allowed itself; the others have to be a little
inside the tolerance. While the tail is a guess, only that is a reason: a guess is too short, so it
errs towards deferring less.

What never happens: a choice from anything but the arguments; a factor outside (1, 2].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rollpacker.policy.engine_forecast import EngineMeasure
from rollpacker.policy.group_law import GroupLaw, ObservedGroup
from rollpacker.policy.ladder_ages import oldest_draw
from rollpacker.policy.ladder_forecast import Forecast, PlannerRules, forecast, weighed

_FACTORS = (1.25, 1.5, 1.75, 2.0)
# Forecasts of the same ladder differ by so much: it is taken if it is foretold to be inside the
# tolerance by this share of it, so that one at the edge is not taken and left all the time.
_MARGIN = 0.15
_EQUAL = 1e-3  # ladders whose tokens per second differ by less: where rewards decide the times
# Of a single level: so many rounds fill its long round, and hardly anything is left waiting: draws
# stay young.
_ALONE = tuple(1.0 + 1.0 / rounds for rounds in (3, 5, 6, 7, 8))


@dataclass(frozen=True, slots=True)
class LadderChoice:
    """The ladder to climb, and why in one line for the event log."""

    factors: tuple[float, ...]
    sizes: tuple[int, ...]  # tensor-parallel size of the engines, by level
    reason: str
    selection_weights: bool = False  # groups count by what deferral selects


def choose_ladder(
    rules: PlannerRules,
    engines: Mapping[int, EngineMeasure],
    groups: Sequence[ObservedGroup],
    present: tuple[float, ...],
    present_sizes: tuple[int, ...],
    present_weights: bool = False,
) -> LadderChoice:
    """The ladder for the next rounds; the present one while too little has been seen.

    `engines`: by tensor-parallel size, all that are to be had. `present_sizes`: by level, of these.
    `present_weights`: whether groups count by what deferral selects.
    """
    name = ladder_name(present, present_sizes)
    if sum(group.complete for group in groups) < rules.min_groups:
        reason = f"keeps {name}: {len(groups)} groups seen so far"
        return LadderChoice(present, present_sizes, reason, present_weights)
    law = GroupLaw(groups, rules.max_response_tokens)
    now = forecast(rules, engines, law, present, sizes=present_sizes)
    if present_weights:
        now = weighed(now)
    is_guess = law.stand_in > rules.max_stand_in and law.keys[-1] < rules.max_response_tokens
    stays = _allowed(rules, now)
    if is_guess and stays:
        return LadderChoice(
            present,
            present_sizes,
            f"keeps {name}: the longest group that was seen whole stands for"
            f" {law.stand_in:.0f}, so the tail is a guess",
            present_weights,
        )
    plain = [forecast(rules, engines, law, factors) for factors in _candidates(rules)]
    others = [item for item in plain if not (rules.selection_weights and item.factors)]
    if rules.selection_weights is not False:
        others += [weighed(item) for item in plain if item.factors]
    allowed = [other for other in others if _allowed(rules, other, _MARGIN)]
    most = max(item.tokens_per_second for item in allowed)
    equal = (item for item in allowed if item.tokens_per_second >= (1.0 - _EQUAL) * most)
    best = min(equal, key=lambda item: item.decode_seconds)
    gain = _gain(now, best)
    if stays and gain < rules.min_gain:
        reason = f"keeps {_describe(now)}: the best other saves {gain:.1%}"
        return LadderChoice(present, present_sizes, reason, present_weights)
    return LadderChoice(
        best.factors,
        best.sizes,
        f"takes {_describe(best)} instead of {_describe(now)}: {len(groups)} groups",
        best.selection_weights,
    )


def _candidates(rules: PlannerRules) -> list[tuple[float, ...]]:
    """Every ladder of the usual factors that keeps draws young enough; no deferral is one of them,
    and always allowed."""
    usual = [
        factors
        for levels in range(rules.max_levels + 1)
        for factors in product(_FACTORS, repeat=levels)
    ]
    usual += [(factor,) for factor in _ALONE if rules.max_levels]
    at_most = rules.max_deferral_age
    return [item for item in usual if oldest_draw(item, rules.prompts_per_step) <= at_most]


def _gain(now: Forecast, best: Forecast) -> float:
    """What the best ladder saves of the rollout's seconds, for as many trained tokens.

    Not of the whole step's: what a change costs, the queue that it leaves, is rollout too.
    """
    saved = now.step_seconds * (1.0 - now.tokens_per_second / best.tokens_per_second)
    return saved / now.rollout_seconds


def _allowed(rules: PlannerRules, item: Forecast, margin: float = 0.0) -> bool:
    return (
        item.max_age <= rules.max_deferral_age
        and abs(item.length_ratio - 1.0) <= (1.0 - margin) * rules.length_tolerance
    )


def ladder_name(factors: tuple[float, ...], sizes: tuple[int, ...] = ()) -> str:
    """For people. Sizes are told where they are the run's to choose."""
    name = "no deferral" if not factors else "eta " + ", ".join(f"{f:g}" for f in factors)
    if not any(sizes):
        return name
    told = sizes[:1] if len(set(sizes)) == 1 else sizes
    return f"{name} on engines of size {', '.join(map(str, told))}"


def _describe(item: Forecast) -> str:
    return (
        f"{ladder_name(item.factors, item.sizes)} ({item.rollout_seconds:.3g} s a round,"
        f" trained length x{item.length_ratio:.3f}{' by weights' * item.selection_weights},"
        f" oldest draw {item.max_age:.0f} steps)"
    )
