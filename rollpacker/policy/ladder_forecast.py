"""What a ladder is expected to do: seconds per round, trained lengths, ages.

    observed groups --Kaplan-Meier--> law of (longest response, lengths) --+
    engine: seconds per step, KV capacity ---------------------------------+--> seconds per round
    how responses change, and which drafts stand --------------------------+    and level, ratio
                                                                                of trained lengths

A ladder is a tuple of factors, one per level below the last; () is synchronous. A level-l round
launches eta_l * P0 of the groups that lost all races before, so it sees a slice of the law: from
the share that earlier levels have kept to the share that it keeps itself. Its time is the integral
of the step time over the tokens of the longest response that it needs, on the fullest replica.
Levels recur at fixed relative rates, which give the mean time, and the age at which a draw is
trained.

Levels differ in what limits them: the last ones hold few and long responses, whose KV has to fit,
the first ones many short ones, which want many replicas. So each level may have a tensor-parallel
size of its own; which groups its rounds keep is the same at any size, only their time differs. A
round of another size than the one before it waits for the engines to be resized.

Where groups count by what deferral selects (`weighed`), lengths are those of groups as they count,
and tokens those of so many groups as would say as much if all counted 1: of a level, the share that
stays longer than the cut of the one before it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from statistics import NormalDist, fmean, median

from rollpacker.policy.engine_forecast import EngineMeasure, Pool, decode_profile, interpolated
from rollpacker.policy.group_law import GroupLaw
from rollpacker.policy.ladder_ages import Ages, level_ages, level_changes
from rollpacker.policy.response_drift import Unchanged
from rollpacker.policy.reward_forecast import GraderMeasure, scored_seconds

# Standard normal numbers, equally likely cases of what varies between rounds. Where a level keeps
# about as many groups as end by themselves, a case is a whole round to the cap: so many of them.
_CASES = tuple(NormalDist().inv_cdf((n + 0.5) / 32) for n in range(32))
# What selection weights leave of a missing length, and what they take of the effective share for
# each level beside what is foretold: groups near a cut turn short more often, and weights scatter.
# Simulated 0.0 to 0.35, and 0.012 to 0.028 (docs/decisions/0044).
_LEFT_MISSING = 0.25
_SCATTER = 0.025


def _always(updates: float, tokens: float) -> float:  # noqa: ARG001
    return 1.0


def _never(age: float) -> float:  # noqa: ARG001
    return 0.0


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """What is planned for, and its limits."""

    prompts_per_step: int  # P0
    responses_per_prompt: int  # R0
    max_response_tokens: int  # the cap
    max_deferral_age: int = 32  # steps
    length_tolerance: float = 0.02  # of the trained mean length, both ways
    min_gain: float = 0.03  # of the rollout's seconds, for a change
    max_levels: int = 3
    min_groups: int = 64  # seen before anything is planned
    max_stand_in: float = 4.0  # groups for which the longest complete one may stand
    unchanged: Unchanged = _always  # whether a response is, up to a token, some updates later
    acceptance: Callable[[float], float] = _never  # share of a draft's tokens accepted then
    graders: Mapping[str, GraderMeasure] = field(default_factory=dict)  # by kind
    resize_seconds: float = 0.0  # for which nothing is decoded, when engines change their size
    smallest_size: int = 1  # tensor-parallel sizes from which to choose
    largest_size: int = 0  # 0: engines keep their own
    # Whether groups count by what deferral selects; None: the planner chooses.
    selection_weights: bool | None = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a candidate is expected to do."""

    factors: tuple[float, ...]
    sizes: tuple[int, ...]  # tensor-parallel size of the engines, by level
    rollout_seconds: float  # mean over its rounds, with their rewards and the resizes between them
    decode_seconds: float  # of these, while tokens are decoded
    length_ratio: float  # trained mean over uncensored mean; of groups as they count
    effective_share: float  # of groups that say as much as all do, if they count by what selects
    max_age: float  # steps
    step_seconds: float  # of a whole step
    tokens_per_second: float  # trained, over whole steps; of groups that say as much as all do
    selection_weights: bool = False  # groups count by what deferral selects


@dataclass(frozen=True, slots=True)
class LevelRound:
    """The rounds of one level of a ladder."""

    rate: float  # of the run's rounds
    factor: float  # eta; 1: nobody loses
    oldest: float  # steps, the greatest age of what it launches
    pool: Pool
    stays: float  # of what it launches, what is longer than the cut of the level before
    start: float  # tokens that come from drafts
    ends: tuple[float, ...]  # tokens of the longest response that it needs, equally likely cases

    def seconds(
        self, rules: PlannerRules, engine: EngineMeasure, law: GroupLaw
    ) -> tuple[float, float]:
        """Until its rewards are known, on average; of these, while tokens are decoded."""
        groups = self.factor * rules.prompts_per_step / engine.replicas
        profile = decode_profile(engine, law, groups, self.pool, self.start)
        decoding = [interpolated(law.grid, profile, end) for end in self.ends]
        launched = self.factor * rules.prompts_per_step
        kept = [launched * mass for mass in _race(self.pool, 1.0 / self.factor)[0]]
        places = [bisect.bisect_left(law.grid, end) - 1 for end in self.ends]
        scored = scored_seconds(rules.graders, law, profile, kept, decoding, places)
        return fmean(scored), fmean(decoding)


def level_rounds(
    rules: PlannerRules, law: GroupLaw, factors: tuple[float, ...]
) -> list[LevelRound]:
    """The rounds of each level, 0 first."""
    rates = [1.0]  # rounds of each level per level-0 round
    for level, factor in enumerate(factors):
        launched = factors[level + 1] if level + 1 < len(factors) else 1.0
        rates.append(rates[-1] * (factor - 1.0) / launched)
    total = sum(rates)
    pool = tuple(item.mass for item in law.bins)
    first = pool  # of these, as at the first launch
    found: list[LevelRound] = []
    before: Sequence[float] = (1.0,) * len(law.bins)  # unchanged up to the keys of each bin
    reached, behind, stays = 0.0, 1.0, 1.0  # `behind`: of all groups, those that get there
    all_ages = level_ages(factors, rules.prompts_per_step)
    for rate, factor, ages in zip(rates, (*factors, 1.0), all_ages, strict=True):
        if found:
            after = [
                sum(share * rules.unchanged(age, item.last_key) for age, share in ages.items())
                for item in law.bins
            ]
            lost = _race(pool, 1.0 / found[-1].factor)[1]
            pool, first = _again(law, pool, first, 1.0 / found[-1].factor, before, after)
            stays = sum(mass for mass, longer in zip(pool, lost, strict=True) if longer)
            before = after
            behind *= 1.0 - 1.0 / found[-1].factor
        ends = _ends(rules, law, pool, factor, behind)
        start = _mean(rules.acceptance, ages) * reached
        found.append(LevelRound(rate / total, factor, max(ages), pool, stays, start, ends))
        reached = median(ends)
    return found


def forecast(
    rules: PlannerRules,
    engines: Mapping[int, EngineMeasure],
    law: GroupLaw,
    factors: tuple[float, ...],
    sizes: tuple[int, ...] = (),
) -> Forecast:
    """What a ladder of these factors is expected to do.

    `engines`: the same devices at each tensor-parallel size that is to be had. `sizes`: those of
    the levels; empty: the best ones.
    """
    rounds = level_rounds(rules, law, factors)
    seconds = [  # of each level, by size: with rewards, without them
        {
            size: item.seconds(rules, engine, law)
            for size, engine in engines.items()
            if not sizes or size == sizes[level]
        }
        for level, item in enumerate(rounds)
    ]
    resizes = level_changes(factors, rules.prompts_per_step)

    def of_sizes(chosen: tuple[int, ...]) -> tuple[float, float]:
        """Mean seconds of a round: with rewards and resizes, and without either."""
        both = [of_level[size] for size, of_level in zip(chosen, seconds, strict=True)]
        scored = sum(item.rate * one for item, (one, _) in zip(rounds, both, strict=True))
        decoding = sum(item.rate * one for item, (_, one) in zip(rounds, both, strict=True))
        resized = sum(share for (a, b), share in resizes.items() if chosen[a] != chosen[b])
        return scored + resized * rules.resize_seconds, decoding

    best = min(product(*seconds), key=of_sizes)
    rollout_seconds, decode_seconds = of_sizes(best)
    kept = [_race(item.pool, 1.0 / item.factor)[0] for item in rounds]
    tokens = sum(  # of a trained group
        item.rate * _mean_tokens(law, pool) for item, pool in zip(rounds, kept, strict=True)
    )
    step_seconds = rollout_seconds + engines[best[0]].other_seconds
    return Forecast(
        factors,
        best,
        rollout_seconds,
        decode_seconds,
        tokens / law.tokens(0.0, 1.0),
        _effective_share(rounds),
        max(item.oldest for item in rounds),
        step_seconds,
        tokens * rules.prompts_per_step / step_seconds,
    )


def weighed(item: Forecast) -> Forecast:
    """The same ladder, if groups count by what deferral selects."""
    ratio = 1.0 + _LEFT_MISSING * (item.length_ratio - 1.0)
    effective = item.effective_share - _SCATTER * len(item.factors)
    tokens = item.tokens_per_second * effective * ratio / item.length_ratio
    return replace(item, length_ratio=ratio, tokens_per_second=tokens, selection_weights=True)


def _effective_share(rounds: Sequence[LevelRound]) -> float:
    """Groups of weight 1 that would say as much, of all: as if those that stay at a level counted
    the same, the inverse of their share."""
    squares, weight = 0.0, 1.0
    for item in rounds:
        weight /= item.stays
        squares += item.rate * weight  # a share 1 / weight of them counts
    return 1.0 / squares


def _race(pool: Pool, share: float) -> tuple[Pool, Pool]:
    """The shortest `share` of a pool, and the rest."""
    kept, lost = [], []
    for mass in pool:
        won = min(mass, max(0.0, share))
        share -= won
        kept.append(won)
        lost.append(mass - won)
    return tuple(kept), tuple(lost)


def _mean(of_age: Callable[[float], float], ages: Ages) -> float:
    return sum(share * of_age(age) for age, share in ages.items())


def _again(
    law: GroupLaw,
    pool: Pool,
    first: Pool,
    kept: float,
    before: Sequence[float],
    after: Sequence[float],
) -> tuple[Pool, Pool]:
    """What the losers of a pool are when they are launched again, and what of it is as at first.

    `before`, `after`: probability that the longest response of each bin is unchanged, at the last
    launch and at this one. What came out as at the first launch (`first`) may do so again; the
    others are drawn afresh behind their first changed token: as before as far as the prompt
    decides, else like any group with more tokens than that.
    """
    lost = _race(pool, kept)[1]
    total = sum(lost)
    first = tuple(
        min(1.0, new / old) * part * mass / (all_ * total) if all_ and old else 0.0
        for part, mass, all_, old, new in zip(first, lost, pool, before, after, strict=True)
    )
    fresh = [mass / total - part for mass, part in zip(lost, first, strict=True)]
    prompt = _prompt_share(law, lost)
    any_group = (1.0 - prompt) * sum(fresh)
    again = tuple(
        part + prompt * changed + any_group * longer
        for part, changed, longer in zip(first, fresh, _longer(law, lost, after), strict=True)
    )
    return again, first


def _longer(law: GroupLaw, lost: Pool, unchanged: Sequence[float]) -> list[float]:
    """The law of groups that have more tokens than those that were lost had before they changed."""
    bins = range(len(lost))
    behind = list(accumulate(reversed(lost)))[::-1]  # lost in this bin or a later one
    mass = list(accumulate(item.mass for item in reversed(law.bins)))[::-1]
    changed = [behind[n] * ((unchanged[n - 1] if n else 1.0) - unchanged[n]) for n in bins]
    total = sum(changed)
    if total <= 0.0:
        return [item.mass for item in law.bins]
    shares = accumulate(changed[n] / total / mass[n] for n in bins)
    return [share * item.mass for share, item in zip(shares, law.bins, strict=True)]


def _prompt_share(law: GroupLaw, lost: Pool) -> float:
    """How much of a pool's distance from the mean its prompts keep when they are drawn afresh."""
    mean = law.tokens(0.0, 1.0)
    distance = _mean_tokens(law, lost) - mean
    fresh = sum(mass * item.fresh_tokens for mass, item in zip(lost, law.bins, strict=True))
    kept = fresh / sum(lost) - mean
    return min(1.0, max(0.0, kept / distance)) if distance > 0.0 else 0.0


def _mean_tokens(law: GroupLaw, pool: Pool) -> float:
    total = sum(mass * item.tokens for mass, item in zip(pool, law.bins, strict=True))
    return total / sum(pool)


def _ends(
    rules: PlannerRules, law: GroupLaw, pool: Pool, factor: float, behind: float
) -> tuple[float, ...]:
    """Longest needed response of a round, in tokens, in each of the equally likely cases.

    The share of the launched groups that are short varies from round to round, and is known from
    the observed groups only. Where it matters most, at the edge of those that never stop, its mean
    says little. What a level launches are all long groups of more draws: a share `behind`.
    """
    launched = factor * rules.prompts_per_step
    if factor <= 1.0:  # the longest of P0: 1 - share is about exponential
        shares = [1.0 + math.log(NormalDist().cdf(case)) / launched for case in _CASES]
    else:
        long_ = 1.0 - 1.0 / factor
        varies = long_ * (1.0 - behind * long_)  # times 1 / draws
        deviation = math.sqrt(varies * (1.0 / launched + 1.0 / (behind * law.size)))
        shares = [1.0 - long_ + deviation * case for case in _CASES]
    upto = [0.0, *accumulate(pool)]
    return tuple(_key_at(law, upto, share) for share in shares)


def _key_at(law: GroupLaw, upto: Sequence[float], share: float) -> float:
    """Longest response of the group at this share of a pool, in tokens; `upto`: its bins' ends."""
    place = min(max(bisect.bisect_left(upto, share) - 1, 0), len(law.bins) - 1)
    item, mass = law.bins[place], upto[place + 1] - upto[place]
    part = min(1.0, max(0.0, share - upto[place]) / mass) if mass > 0.0 else 1.0
    return item.first_key + (item.last_key - item.first_key) * part
