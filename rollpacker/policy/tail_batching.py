"""Tail batching as a ladder: which prompts the next round launches, and how many it keeps.

Level 0 takes new prompts, level l the draws that wait on it: a deferral lifts one. Below level L a
round is *short*: it launches ceil(eta_l * P0) draws, keeps the P0 that win the race, and defers the
others one level up. A round of level L is *long*: it launches P0 draws and defers none. The highest
level with enough draws runs next; when none has, the data are at their end and the rest is raced
until one step is left (a drain). L = 0 is plain synchronous RL, L = 1 is the paper (section 4.1).

A mode is a value of `TailBatchingRules`, never a second loop.

Invariants (tests/unit/test_tail_batching.py):
- every draw is launched until it is trained; nothing is dropped here (a round drops groups
  without advantages where the rules say so, and reports them);
- a round keeps P0 draws, except the last one of the data, which keeps what is left;
- a draw whose age reaches max_deferral_age is in the next round and cannot lose it. With eta <= 2
  a step defers at most P0 new draws, so at most P0 become overdue at once and none is older.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollpacker.policy.advantages import GROUP_RELATIVE, AdvantageRules
from rollpacker.types import DeferredDraw, Draw, DrawId, RoundKind


class RaceKind(enum.Enum):
    """What decides which groups of a short round are kept."""

    TOKENS = "tokens"  # fewest tokens in the longest response: a pure function of the responses
    ARRIVAL = "arrival"  # first to finish: the paper's rule, depends on timing


class Routing(enum.Enum):
    """Which of the replicas that have room gets the next group."""

    LEAST_TOKENS = "least_tokens"  # fewest KV tokens outstanding
    ROUND_ROBIN = "round_robin"  # the one whose turn it is: for comparison


@dataclass(frozen=True, slots=True)
class TailBatchingRules:
    """A mode, resolved to its numbers."""

    prompts_per_step: int  # P0
    responses_per_prompt: int  # R0
    speculation_factors: tuple[float, ...] = ()  # eta of levels 0 to L-1, each in (1, 2]
    response_speculation_factor: float = 1.0  # eta_R
    race: RaceKind = RaceKind.TOKENS
    keeps_seeds: bool = True  # a deferred draw is replayed, not sampled afresh
    streams: bool = True  # rewards and gradients start while the rollout runs
    max_deferral_age: int = 32  # steps
    advantages: AdvantageRules = GROUP_RELATIVE
    dynamic_sampling: bool = False  # a group without advantages gives its place to a new prompt
    max_replacements: int = 3  # times P0, at least 1: those new prompts of one round at most
    routing: Routing = Routing.LEAST_TOKENS
    tensor_parallel_sizes: tuple[int, ...] = ()  # of engines, by level, the last one for all above
    selection_weights: bool = False  # groups count by what deferral selects

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1 or self.responses_per_prompt < 1:
            raise ValueError(
                f"prompts_per_step {self.prompts_per_step} and responses_per_prompt"
                f" {self.responses_per_prompt} must be at least 1"
            )
        if self.max_replacements < 1:
            raise ValueError(f"max_replacements {self.max_replacements} must be at least 1")
        if any(not 1.0 < factor <= 2.0 for factor in self.speculation_factors):
            raise ValueError(f"speculation_factors {self.speculation_factors}: each in (1, 2]")

    @property
    def levels(self) -> int:
        """L, the last level."""
        return len(self.speculation_factors)

    def launch_count(self, level: int) -> int:
        """Draws that a round of this level launches."""
        if level >= self.levels:
            return self.prompts_per_step
        # Rounded first: 1.1 * 10 is a hair above 11 in binary and must not become 12.
        return math.ceil(round(self.speculation_factors[level] * self.prompts_per_step, 9))

    def tensor_parallel_size(self, level: int) -> int:
        """Of the engines in the rounds of this level; 0: they keep their own."""
        sizes = self.tensor_parallel_sizes
        return sizes[min(level, len(sizes) - 1)] if sizes else 0

    def response_count(self, kind: RoundKind) -> int:
        """Responses launched per draw; the first R0 to finish count."""
        if kind is not RoundKind.SHORT:
            return self.responses_per_prompt
        return math.ceil(round(self.response_speculation_factor * self.responses_per_prompt, 9))


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is waiting at the start of a step."""

    step: int
    deferred: tuple[Draw, ...]  # the long-prompt queue, all levels, oldest first within a level
    new_prompts: int  # prompts that data and max_steps still allow
    long_round: bool = False  # somebody asked for one


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round launches and keeps."""

    step: int
    kind: RoundKind
    level: int
    queued: tuple[Draw, ...]  # taken from the queue, in launch order
    new_prompts: int  # launched after them
    keep: int  # groups that the step trains
    response_count: int  # responses launched per draw
    protected: frozenset[DrawId] = frozenset()  # overdue: they cannot lose the race


def queue_on(
    levels: int, queue: Sequence[DeferredDraw], levels_before: int
) -> tuple[DeferredDraw, ...]:
    """The long-prompt queue by level, on a ladder of so many, that was on one of `levels_before`.

    What waited for a long round still does: raced once more, it would lose again, or decide when
    its round ends. Where levels come together the oldest are first, else the order stays.
    """
    moved = [
        replace(item, draw=replace(item.draw, level=_level_on(levels, item.draw, levels_before)))
        for item in queue
    ]
    ways = {(old.draw.level, new.draw.level) for old, new in zip(queue, moved, strict=True)}
    ends = Counter(level for _, level in ways)
    return tuple(
        sorted(
            moved,
            key=lambda item: (
                item.draw.level,
                item.draw.first_step if ends[item.draw.level] > 1 else 0,
            ),
        )
    )


def _level_on(levels: int, draw: Draw, levels_before: int) -> int:
    return levels if draw.level >= levels_before else min(draw.level, levels)


def new_prompt_budget(
    rules: TailBatchingRules, *, data_left: int, deferred: int, steps_left: int | None
) -> int:
    """New prompts that may still be launched so that max_steps ends with an empty queue."""
    if steps_left is None:
        return data_left
    return max(0, min(data_left, rules.prompts_per_step * steps_left - deferred))


def plan(rules: TailBatchingRules, backlog: Backlog) -> RoundPlan | None:
    """The next round, or None when nothing is left."""
    if not backlog.deferred and not backlog.new_prompts:
        return None
    overdue = _overdue(rules, backlog)
    if backlog.long_round and backlog.deferred:
        return _long_round(rules, backlog, overdue, RoundKind.LONG)
    level = _highest_ready_level(rules, backlog)
    if level is None:
        return _drain(rules, backlog, overdue)
    if overdue:
        return _overdue_round(rules, backlog, overdue)
    queued = [draw for draw in backlog.deferred if draw.level == level]
    return _plan(rules, backlog, level, queued[: rules.launch_count(level)])


def _overdue(rules: TailBatchingRules, backlog: Backlog) -> list[Draw]:
    """The draws whose round comes next, oldest first, at most a step's worth."""
    old = [d for d in backlog.deferred if d.age(backlog.step) >= rules.max_deferral_age]
    return sorted(old, key=lambda draw: draw.first_step)[: rules.prompts_per_step]


def _highest_ready_level(rules: TailBatchingRules, backlog: Backlog) -> int | None:
    for level in range(rules.levels, 0, -1):
        waiting = sum(draw.level == level for draw in backlog.deferred)
        if waiting >= rules.launch_count(level):
            return level
    return 0 if backlog.new_prompts >= rules.launch_count(0) else None


def _drain(rules: TailBatchingRules, backlog: Backlog, overdue: Sequence[Draw]) -> RoundPlan:
    """The end of the data. While more is left than a step takes, it is raced, lowest levels first:
    so the longest responses share the last round instead of holding up each. A mode that samples
    deferred draws afresh does not race them."""
    left = len(backlog.deferred) + backlog.new_prompts
    if not rules.keeps_seeds or left <= rules.prompts_per_step or not rules.levels:
        return _long_round(rules, backlog, overdue, RoundKind.DRAIN)
    launch = min(left, max(map(rules.launch_count, range(rules.levels))))
    new_prompts = min(backlog.new_prompts, launch - len(overdue))
    by_level = sorted(backlog.deferred, key=lambda draw: draw.level)  # stable: oldest first
    queued = _unique([*overdue, *by_level])[: launch - new_prompts]
    return RoundPlan(
        step=backlog.step,
        kind=RoundKind.DRAIN,
        level=max((draw.level for draw in queued), default=0),
        queued=tuple(queued),
        new_prompts=new_prompts,
        keep=rules.prompts_per_step,
        response_count=rules.responses_per_prompt,
        protected=frozenset(draw.id for draw in overdue),
    )


def _long_round(
    rules: TailBatchingRules, backlog: Backlog, overdue: Sequence[Draw], kind: RoundKind
) -> RoundPlan:
    """A step's worth of all levels, longest first; new prompts fill it up, and none loses."""
    by_level = sorted(backlog.deferred, key=lambda draw: -draw.level)  # stable: oldest first
    queued = _unique([*overdue, *by_level])[: rules.prompts_per_step]
    new_prompts = min(rules.prompts_per_step - len(queued), backlog.new_prompts)
    return RoundPlan(
        step=backlog.step,
        kind=kind if rules.levels else RoundKind.LONG,
        level=max((draw.level for draw in queued), default=0),
        queued=tuple(queued),
        new_prompts=new_prompts,
        keep=len(queued) + new_prompts,
        response_count=rules.responses_per_prompt,
    )


def _overdue_round(
    rules: TailBatchingRules, backlog: Backlog, overdue: Sequence[Draw]
) -> RoundPlan:
    """The overdue draws' round, topped up from their own and lower levels, then new prompts."""
    level = max(draw.level for draw in overdue)
    launch = rules.launch_count(level)
    oldest_first = sorted(backlog.deferred, key=lambda draw: draw.first_step)
    near = [draw for draw in oldest_first if draw.level <= level]
    queued = _unique([*overdue, *near])[:launch]
    missing = rules.prompts_per_step - len(queued) - backlog.new_prompts
    if missing > 0:  # a full step comes before staying on the level
        queued = _unique([*queued, *oldest_first])[: len(queued) + missing]
    protected = frozenset(draw.id for draw in overdue)
    return _plan(rules, backlog, level, queued, protected)


def _plan(
    rules: TailBatchingRules,
    backlog: Backlog,
    level: int,
    queued: Sequence[Draw],
    protected: frozenset[DrawId] = frozenset(),
) -> RoundPlan:
    new_prompts = min(rules.launch_count(level) - len(queued), backlog.new_prompts)
    kind = RoundKind.SHORT if level < rules.levels else RoundKind.LONG
    return RoundPlan(
        step=backlog.step,
        kind=kind,
        level=level,
        queued=tuple(queued),
        new_prompts=new_prompts,
        keep=min(rules.prompts_per_step, len(queued) + new_prompts),
        response_count=rules.response_count(kind),
        protected=protected,
    )


def _unique(draws: Sequence[Draw]) -> list[Draw]:
    return list({draw.id: draw for draw in draws}.values())
