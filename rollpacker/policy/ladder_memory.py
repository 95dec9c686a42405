"""What a run remembers of its rounds for its planner, and the choice that follows from it.

    Round --events--> EngineMeter --> EngineMemory --+
    trained and deferred groups ---------------------+--> LadderMemory (part of the run's state)
                                                               |  behind each long round
    seconds of the last steps ---------------------------------+--> `next_ladder` --> LadderChoice

The live coordinator and the simulator both come here: what they plan with is the same. Everything
is a function of the rounds in their order, so a run that is resumed or replayed plans the same.

When groups become too many, half of the draws are forgotten, and never remembered again, whatever
became of them: only that is unbiased. A group that was
deferred and comes back shows how far the weights have drifted. A response that had ended in its
first launch either comes out at the same length or not, which says how fast responses change
(`response_drift`); the share of the tokens that the group had and need not decode again is the
acceptance of drafts. Both are kept by age.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any

from rollpacker.policy.engine_memory import (
    EngineMemory,
    EnginesSeen,
    engines_from_json,
    engines_remembered,
    engines_to_be_had,
    engines_to_json,
    measured_engines,
)
from rollpacker.policy.group_law import ObservedGroup
from rollpacker.policy.ladder_forecast import PlannerRules
from rollpacker.policy.planner import LadderChoice, choose_ladder, ladder_name
from rollpacker.policy.response_drift import Pairs, PairsSeen, between, octave, telling, unchanged
from rollpacker.policy.reward_forecast import GraderMeasure
from rollpacker.policy.reward_meter import RewardSpeed, RewardsSeen, RewardSums
from rollpacker.policy.selection_weights import Selection
from rollpacker.types import DeferredDraw, DrawId, LostRace, RoundKind

STEPS_SEEN = 16  # the last ones, by which a choice falls due, and what no ladder changes is known
_EVERY_STEPS = 4  # between two choices, where long rounds do not say when
_GROUPS = 4000  # at most so many are kept
_HISTORY_STEPS = 48  # since the first launch
_HALF_LIFE_STEPS = 16.0
_FADES = 0.5 ** (1.0 / _HALF_LIFE_STEPS)  # per step
_MIN_COMPARED = 30.0  # draft tokens of an age
_MIN_ANSWERS = 16.0  # before graders of a kind count as measured
_MIN_PAIRS = 16.0  # before groups are weighed by how responses change


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A draw as it was last seen."""

    first_step: int
    response_tokens: tuple[int, ...]
    complete: bool  # False: deferred, with what it had
    first_tokens: tuple[int, ...] = ()  # where its first launch ended by itself; else 0
    grader: str = ""  # kind of it


@dataclass(frozen=True, slots=True)
class SeenGrader:
    """A kind of grader; older rounds fade."""

    waited: RewardSums = field(default_factory=RewardSums)  # while it was what was waited for
    took: Mapping[int, float] = field(default_factory=dict)  # responses, by `part_of_octave`

    @property
    def measure(self) -> GraderMeasure:
        """What the planner goes by."""
        known = self.waited.responses >= _MIN_ANSWERS
        return GraderMeasure(self.waited.per_response if known else 0.0, self.took)


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a round keeps."""

    draw: DrawId
    first_step: int
    response_tokens: tuple[int, ...]
    carried_tokens: int  # of them all, not decoded by the round


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A finished round."""

    step: int
    trained: Sequence[TrainedGroup]
    deferred: Sequence[DeferredDraw]
    engines: EnginesSeen
    moved: Set[DrawId] = frozenset()  # of the trained groups; their drafts say nothing
    rewards: RewardsSeen = field(default_factory=RewardsSeen)


@dataclass(frozen=True, slots=True)
class LadderMemory:
    """See the top of the file."""

    groups: Mapping[DrawId, SeenGroup] = field(default_factory=dict)
    one_in: int = 1  # of the draws is remembered
    engines: EngineMemory = field(default_factory=EngineMemory)
    pairs: PairsSeen = field(default_factory=dict)  # responses that ended twice
    # By age: how many were compared, and how many were the same.
    draft_tokens: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    graders: Mapping[str, SeenGrader] = field(default_factory=dict)  # by kind


def selection_at(memory: LadderMemory, step: int, lost: Mapping[DrawId, LostRace]) -> Selection:
    """By which a step's groups are weighed; `lost`: the races that the queue's draws have lost."""
    whole = (group.response_tokens for group in memory.groups.values() if group.complete)
    compared = sum(item.compared for item in telling(memory.pairs).values())
    law = unchanged(memory.pairs) if compared >= _MIN_PAIRS else None
    return Selection(step, lost, law, sorted(chain.from_iterable(whole)))


def remembered(memory: LadderMemory, seen: RoundSeen) -> LadderMemory:
    """The memory after a round."""
    groups = {
        draw: group
        for draw, group in memory.groups.items()
        if seen.step - group.first_step < _HISTORY_STEPS
    }
    pairs = {key: item.faded(_FADES) for key, item in memory.pairs.items()}
    drafts = _faded(memory.draft_tokens)
    one_in = memory.one_in
    for group in seen.trained:
        if not _sampled(group.draw, one_in):
            continue
        before = groups.get(group.draw)
        if before is not None:
            age = seen.step - group.first_step
            ended = group.response_tokens
            _compare(pairs, age, before.first_tokens, ended)
            if group.draw not in seen.moved:
                had = float(sum(before.response_tokens))
                _count(drafts, age, had, min(had, float(group.carried_tokens)))
        grader = seen.rewards.kinds.get(group.draw, "")
        whole = SeenGroup(group.first_step, group.response_tokens, True, grader=grader)
        _remember(groups, group.draw, whole)
    for item in seen.deferred:
        if _sampled(item.draw.id, one_in):
            ended = tuple(
                tokens if done else 0
                for tokens, done in zip(item.response_tokens, item.finished, strict=True)
            )
            before = groups.get(item.draw.id)
            if before is not None:
                age = seen.step - item.draw.first_step
                _compare(pairs, age, before.first_tokens, ended)
            tokens = tuple(max(1, count) for count in item.response_tokens)
            grader = seen.rewards.kinds.get(item.draw.id, "")
            group_ = SeenGroup(item.draw.first_step, tokens, False, ended, grader)
            _remember(groups, item.draw.id, group_)
    while len(groups) > _GROUPS:
        one_in *= 2
        groups = {draw: group for draw, group in groups.items() if _sampled(draw, one_in)}
    return LadderMemory(
        groups,
        one_in,
        engines_remembered(memory.engines, seen.engines, _FADES),
        pairs,
        drafts,
        _graders(memory.graders, seen.rewards.speeds),
    )


def other_seconds(metrics: Mapping[str, float]) -> float:
    """What a step took beside its rollout and its wait for rewards, by its metrics."""
    waited = metrics.get("timing_s/reward_wait", 0.0)  # older versions do not tell
    return metrics["timing_s/step"] - metrics["timing_s/rollout"] - waited


def is_due(step: int, factors: Sequence[float], kinds: Sequence[RoundKind]) -> bool:
    """Whether the ladder is chosen anew before this step: behind each long round, when least waits.

    A change in between finds draws on levels that are others then. `factors`: of the ladder that
    is in force; `kinds`: of the last `STEPS_SEEN` rounds, newest first.
    """
    if factors and RoundKind.LONG in kinds:
        return kinds[0] is RoundKind.LONG
    if factors and len(kinds) < STEPS_SEEN:
        return False
    return step > 0 and step % _EVERY_STEPS == 0


def next_ladder(
    rules: PlannerRules,
    memory: LadderMemory,
    step: int,
    other_seconds: Sequence[float],
    present: tuple[float, ...],
    present_sizes: tuple[int, ...] = (),
    present_weights: bool = False,
) -> LadderChoice:
    """The ladder from this step on.

    `other_seconds`: what each of the last `STEPS_SEEN` steps took beside its rollout and its wait
    for rewards.
    `present_sizes`: by level, where they are the run's to choose (`rules.largest_size`).
    `present_weights`: whether groups count by what deferral selects.
    """
    sizes = present_sizes or (0,) * (len(present) + 1)
    measured = measured_engines(memory.engines, other_seconds)
    engines = engines_to_be_had(rules, measured, sizes, memory.engines.weight_kv_tokens)
    if not engines:
        count = memory.engines.equations
        reason = f"keeps {ladder_name(present)}: {count:.0f} ends of responses were timed"
        return LadderChoice(present, present_sizes, reason, present_weights)
    known = replace(
        rules,
        unchanged=unchanged(memory.pairs),
        acceptance=_by_age(memory.draft_tokens),
        resize_seconds=memory.engines.resize_seconds,
        graders={kind: grader.measure for kind, grader in memory.graders.items()},
    )
    groups = [
        ObservedGroup(
            tuple(max(1, tokens) for tokens in group.response_tokens),  # one: a step of decoding
            group.complete,
            0.5 ** ((step - group.first_step) / _HALF_LIFE_STEPS),
            group.grader,
        )
        for group in memory.groups.values()
    ]
    had = {size: engine for size, engine in engines.items() if size in {*measured, *sizes}}
    choice = choose_ladder(known, had, groups, present, sizes, present_weights)
    if len(had) < len(engines):  # a size that was never had has to pay by itself
        tried = choose_ladder(
            known, engines, groups, choice.factors, choice.sizes, choice.selection_weights
        )
        if (tried.factors, tried.sizes) != (choice.factors, choice.sizes):
            choice = tried
    return choice if present_sizes else replace(choice, sizes=())


def memory_to_json(memory: LadderMemory) -> dict[str, Any]:
    """As JSON values."""
    return {
        "groups": [
            [*draw, g.first_step, g.response_tokens, g.complete, g.first_tokens, g.grader]
            for draw, g in memory.groups.items()
        ],
        "one_in": memory.one_in,
        "engines": engines_to_json(memory.engines),
        "pairs": [[*key, *astuple(item)] for key, item in memory.pairs.items()],
        "draft_tokens": [[age, *counts] for age, counts in memory.draft_tokens.items()],
        "graders": [
            [kind, *astuple(item.waited), list(item.took.items())]
            for kind, item in memory.graders.items()
        ],
    }


def memory_from_json(values: Mapping[str, Any]) -> LadderMemory:
    """The inverse of `memory_to_json`; nothing where there is nothing."""
    if not values:
        return LadderMemory()
    engines = values["engines"] if "engines" in values else _engines_of_layout_2(values)
    return LadderMemory(
        groups={
            DrawId(epoch, prompt): SeenGroup(first, tuple(tokens), complete, tuple(ended), *grader)
            for epoch, prompt, first, tokens, complete, ended, *grader in values["groups"]
        },
        one_in=values["one_in"],
        engines=engines_from_json(engines),
        pairs={(age, size): Pairs(*counts) for age, size, *counts in values.get("pairs", ())},
        draft_tokens={age: (all_, same) for age, all_, same in values["draft_tokens"]},
        graders={
            kind: SeenGrader(RewardSums(*sums), dict(map(tuple, took)))
            for kind, *sums, took in values.get("graders", ())
        },
    )


def _engines_of_layout_2(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a version kept that knew one size, and did not know which."""
    equations, products, targets = values["speed"]
    speed = {"equations": equations, "products": products, "targets": targets}
    seen = {"speed": speed, "replicas": values["replicas"], "kv_capacity": values["kv_capacity"]}
    return {"sizes": [[0, seen]], "prompt_tokens": values["prompt_tokens"], "last_size": 0}


def _sampled(draw: DrawId, one_in: int) -> bool:
    return zlib.crc32(str(draw).encode()) % one_in == 0


def _remember(groups: dict[DrawId, SeenGroup], draw: DrawId, group: SeenGroup) -> None:
    """A group that came out shorter than when it was cut off stays cut off: it has drifted."""
    before = groups.get(draw)
    if before is None:
        groups[draw] = group
    elif max(group.response_tokens) >= max(before.response_tokens):
        groups[draw] = replace(group, first_tokens=before.first_tokens)


def _compare(
    pairs: dict[tuple[int, int], Pairs], age: int, first: Sequence[int], now: Sequence[int]
) -> None:
    """Add the responses that ended both times."""
    for before, after in zip(first, now, strict=False):
        if before and after:
            key = age, octave(before)
            pairs[key] = pairs.get(key, Pairs()).add(before, same=before == after)


def _graders(
    before: Mapping[str, SeenGrader], seen: Mapping[str, RewardSpeed]
) -> dict[str, SeenGrader]:
    """What a response costs while it is waited for, and how long it takes. Where a round shows that
    it costs less than what counts as measured, that counts from now on: graders that have become
    faster are not waited for any more."""
    found = {
        kind: SeenGrader(item.waited.faded(_FADES), {p: _FADES * n for p, n in item.took.items()})
        for kind, item in before.items()
    }
    for kind, speed in seen.items():
        item = found.get(kind, SeenGrader())
        waited = item.waited.plus(speed.waited.responses, speed.waited.seconds)
        is_less = speed.busy.per_response < waited.per_response
        if min(waited.responses, speed.busy.responses) >= _MIN_ANSWERS and is_less:
            waited = speed.busy
        parts = item.took.keys() | speed.took.keys()
        took = {p: item.took.get(p, 0.0) + speed.took.get(p, 0.0) for p in sorted(parts)}
        found[kind] = SeenGrader(waited, took)
    return found


def _faded(counts: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    return {age: (_FADES * all_, _FADES * same) for age, (all_, same) in counts.items()}


def _count(counts: dict[int, tuple[float, float]], age: int, compared: float, same: float) -> None:
    if compared:
        old_compared, old_same = counts.get(age, (0.0, 0.0))
        counts[age] = (old_compared + compared, old_same + same)


def _by_age(counts: Mapping[int, tuple[float, float]]) -> Callable[[float], float]:
    """The measured share at any age, by points of neighbouring ages that have enough comparisons
    together (`between`); none where nothing was compared."""
    points = [(0.0, 1.0)]
    ages, compared, same = 0.0, 0.0, 0.0
    for age in sorted(counts):
        ages += math.log1p(age) * counts[age][0]
        compared += counts[age][0]
        same += counts[age][1]
        if compared >= _MIN_COMPARED:
            points.append((ages / compared, same / compared))
            ages, compared, same = 0.0, 0.0, 0.0
    if len(points) == 1:
        return lambda _age: 0.0
    return lambda age: between(points, math.log1p(age))
