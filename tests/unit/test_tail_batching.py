"""The ladder of `rollpacker.policy.tail_batching`, driven over whole runs.

`drive` plays the rounds of a run with a given chooser of losers, so that hypothesis can try any
outcome of the races.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.tail_batching import (
    Backlog,
    RaceKind,
    RoundPlan,
    TailBatchingRules,
    new_prompt_budget,
    plan,
    queue_on,
)
from rollpacker.types import DeferredDraw, Draw, DrawId, RoundKind

PAPER = TailBatchingRules(8, 4, (1.25,), 1.25, RaceKind.ARRIVAL, keeps_seeds=False)
EXACT = TailBatchingRules(8, 4, (1.75, 2.0))


@dataclass
class Run:
    plans: list[RoundPlan] = field(default_factory=list)
    trained: list[DrawId] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)


def drive(rules: TailBatchingRules, prompts: int, max_steps: int | None, rng: random.Random) -> Run:
    run, deferred, position = Run(), list[Draw](), 0
    for step in range(10_000):
        steps_left = None if max_steps is None else max_steps - step
        budget = new_prompt_budget(
            rules, data_left=prompts - position, deferred=len(deferred), steps_left=steps_left
        )
        chosen = plan(rules, Backlog(step, tuple(deferred), budget))
        if chosen is None:
            return run
        new = [
            Draw(0, str(position + i), (), 0, first_step=step) for i in range(chosen.new_prompts)
        ]
        position += chosen.new_prompts
        draws = [*chosen.queued, *new]
        unprotected = [draw for draw in draws if draw.id not in chosen.protected]
        losers = rng.sample(unprotected, len(draws) - chosen.keep)
        lost = {draw.id for draw in losers}
        winners = [draw for draw in draws if draw.id not in lost]
        run.plans.append(chosen)
        run.trained += [draw.id for draw in winners]
        run.ages += [draw.age(step) for draw in winners]
        run.step_sizes.append(len(winners))
        launched = {draw.id for draw in draws}
        deferred = [draw for draw in deferred if draw.id not in launched]
        deferred += [
            Draw(0, d.prompt_id, (), min(d.level + 1, rules.levels), d.first_step) for d in losers
        ]
    raise AssertionError("the run does not end")


rules_strategy = st.builds(
    TailBatchingRules,
    prompts_per_step=st.integers(1, 12),
    responses_per_prompt=st.integers(1, 4),
    speculation_factors=st.lists(st.floats(1.01, 2.0), max_size=3).map(tuple),
    max_deferral_age=st.integers(1, 20),
)
run_strategy = {
    "rules": rules_strategy,
    "prompts": st.integers(0, 200),
    "max_steps": st.none() | st.integers(1, 30),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=300, deadline=None)
@given(**run_strategy)
def test_every_draw_is_trained_exactly_once(
    rules: TailBatchingRules, prompts: int, max_steps: int | None, seed: int
) -> None:
    run = drive(rules, prompts, max_steps, random.Random(seed))
    expected = prompts if max_steps is None else min(prompts, max_steps * rules.prompts_per_step)
    assert Counter(run.trained) == Counter(DrawId(0, str(i)) for i in range(expected))


@settings(max_examples=300, deadline=None)
@given(**run_strategy)
def test_every_step_is_full_but_the_last(
    rules: TailBatchingRules, prompts: int, max_steps: int | None, seed: int
) -> None:
    run = drive(rules, prompts, max_steps, random.Random(seed))
    assert all(size == rules.prompts_per_step for size in run.step_sizes[:-1])
    assert max_steps is None or len(run.step_sizes) <= max_steps


@settings(max_examples=300, deadline=None)
@given(**run_strategy)
def test_no_draw_grows_older_than_the_starvation_bound(
    rules: TailBatchingRules, prompts: int, max_steps: int | None, seed: int
) -> None:
    run = drive(rules, prompts, max_steps, random.Random(seed))
    assert max(run.ages, default=0) <= rules.max_deferral_age + rules.levels


@settings(max_examples=100, deadline=None)
@given(**run_strategy)
def test_rounds_never_launch_more_than_their_level_allows(
    rules: TailBatchingRules, prompts: int, max_steps: int | None, seed: int
) -> None:
    for chosen in drive(rules, prompts, max_steps, random.Random(seed)).plans:
        launched = len(chosen.queued) + chosen.new_prompts
        assert chosen.keep <= launched
        if chosen.kind is RoundKind.DRAIN:
            assert launched <= max(map(rules.launch_count, range(rules.levels)))
        else:
            assert launched <= rules.launch_count(chosen.level)


@settings(max_examples=100)
@given(**run_strategy)
def test_the_last_round_defers_nothing(
    rules: TailBatchingRules, prompts: int, max_steps: int | None, seed: int
) -> None:
    plans = drive(rules, prompts, max_steps, random.Random(seed)).plans
    assert all(len(last.queued) + last.new_prompts == last.keep for last in plans[-1:])


def test_the_paper_runs_four_short_rounds_to_one_long_round() -> None:
    run = drive(PAPER, prompts=400, max_steps=None, rng=random.Random(0))
    kinds = [chosen.kind for chosen in run.plans]
    assert kinds[:10] == ([RoundKind.SHORT] * 4 + [RoundKind.LONG]) * 2
    assert [p.response_count for p in run.plans[:5]] == [5, 5, 5, 5, 4]


def test_eta_one_and_a_half_with_two_levels_has_six_short_rounds_per_cycle() -> None:
    rules = TailBatchingRules(8, 4, (1.5, 1.5))
    run = drive(rules, prompts=480, max_steps=None, rng=random.Random(0))
    levels = [chosen.level for chosen in run.plans if chosen.kind is not RoundKind.DRAIN]
    assert levels.count(0) / levels.count(2) == pytest.approx(6, rel=0.25)


def test_without_levels_every_round_is_long_and_takes_new_prompts() -> None:
    run = drive(TailBatchingRules(8, 4), prompts=20, max_steps=None, rng=random.Random(0))
    assert [(p.kind, p.new_prompts, len(p.queued)) for p in run.plans] == [
        (RoundKind.LONG, 8, 0),
        (RoundKind.LONG, 8, 0),
        (RoundKind.LONG, 4, 0),
    ]


def test_a_data_set_smaller_than_a_step_is_one_small_round() -> None:
    run = drive(EXACT, prompts=3, max_steps=None, rng=random.Random(0))
    assert run.step_sizes == [3]


REST = (
    Draw(0, "low-old", (), 1, 0),
    Draw(0, "high", (), 2, 1),
    Draw(0, "low-new", (), 1, 3),
)


def test_what_fits_a_step_is_the_last_round_longest_first() -> None:
    chosen = plan(EXACT, Backlog(5, REST, new_prompts=2))
    assert chosen is not None
    assert chosen.kind is RoundKind.DRAIN
    assert [draw.prompt_id for draw in chosen.queued] == ["high", "low-old", "low-new"]
    assert (chosen.new_prompts, chosen.keep) == (2, 5)


def test_what_is_more_than_a_step_is_raced_lowest_level_first() -> None:
    rules = TailBatchingRules(2, 4, (1.5, 2.0))
    chosen = plan(rules, Backlog(5, REST, new_prompts=2))
    assert chosen is not None
    assert chosen.kind is RoundKind.DRAIN
    assert [draw.prompt_id for draw in chosen.queued] == ["low-old", "low-new"]
    assert (chosen.new_prompts, chosen.keep, chosen.response_count) == (2, 2, 4)


def test_draws_that_are_sampled_afresh_are_not_raced_at_the_end() -> None:
    rules = TailBatchingRules(2, 4, (2.0,), keeps_seeds=False)
    chosen = plan(rules, Backlog(5, REST[:1], new_prompts=2))
    assert chosen is not None
    assert chosen.kind is RoundKind.DRAIN
    assert (len(chosen.queued), chosen.new_prompts, chosen.keep) == (1, 1, 2)


def test_an_overdue_draw_makes_the_next_round_its_own_and_is_protected() -> None:
    rules = TailBatchingRules(2, 1, (1.5, 1.5), max_deferral_age=4)
    deferred = (Draw(0, "old", (), 1, 0), Draw(0, "young", (), 1, 3))
    chosen = plan(rules, Backlog(4, deferred, new_prompts=50))
    assert chosen is not None
    assert (chosen.level, chosen.kind) == (1, RoundKind.SHORT)
    assert [draw.prompt_id for draw in chosen.queued] == ["old", "young"]
    assert chosen.new_prompts == 1
    assert chosen.protected == {DrawId(0, "old")}


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=12),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_new_ladder_keeps_every_draw_and_what_waited_for_a_long_round_still_does(
    drawn: list[tuple[int, int]], before: int, levels: int
) -> None:
    queue = [
        DeferredDraw(Draw(0, str(number), (7,), min(level, before), first), (3,), (False,))
        for number, (level, first) in enumerate(drawn)
    ]
    queue.sort(key=lambda item: item.draw.level)
    moved = queue_on(levels, queue, before)
    old = {item.draw.id: item.draw.level for item in queue}
    assert {item.draw.id for item in moved} == set(old)
    for item in moved:
        was = old[item.draw.id]
        assert item.draw.level == (levels if was == before else min(was, levels))
    assert [item.draw.level for item in moved] == sorted(item.draw.level for item in moved)
    for level in range(1, levels + 1):
        here = [item.draw.id for item in moved if item.draw.level == level]
        if len({old[draw] for draw in here}) > 1:
            first_steps = [item.draw.first_step for item in moved if item.draw.level == level]
            assert first_steps == sorted(first_steps)
        else:
            assert here == [item.draw.id for item in queue if item.draw.id in here]


def test_max_steps_limits_new_prompts_so_that_the_queue_can_drain() -> None:
    assert new_prompt_budget(EXACT, data_left=100, deferred=6, steps_left=2) == 10
    assert new_prompt_budget(EXACT, data_left=3, deferred=6, steps_left=2) == 3
    assert new_prompt_budget(EXACT, data_left=100, deferred=6, steps_left=None) == 100


@pytest.mark.parametrize("factor", [1.0, 2.5, 0.5])
def test_a_speculation_factor_outside_its_range_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="speculation_factors"):
        TailBatchingRules(8, 4, (factor,))
