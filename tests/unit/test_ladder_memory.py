"""What a run remembers for its planner is a function of its rounds, and survives a restart."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.engine_memory import EnginesSeen
from rollpacker.policy.engine_meter import SpeedSums
from rollpacker.policy.ladder_forecast import PlannerRules
from rollpacker.policy.ladder_memory import (
    LadderMemory,
    RoundSeen,
    SeenGroup,
    TrainedGroup,
    is_due,
    memory_from_json,
    memory_to_json,
    next_ladder,
    remembered,
    selection_at,
)
from rollpacker.policy.response_drift import Pairs
from rollpacker.policy.reward_meter import RewardSpeed, RewardsSeen, RewardSums
from rollpacker.types import DeferredDraw, Draw, DrawId, RoundKind

P0, R0, CAP = 8, 4, 4096
SHORT, LONG, DRAIN = RoundKind.SHORT, RoundKind.LONG, RoundKind.DRAIN
RULES = PlannerRules(P0, R0, CAP)
SPEED = SpeedSums().add((100.0, 100.0, 1000.0), 1.0).add((100.0, 800.0, 8000.0), 2.0)


def graded(waited: RewardSums, busy: RewardSums) -> RoundSeen:
    rewards = RewardsSeen({}, {"judge": RewardSpeed(waited, busy, {0: 5.0, 41: busy.responses})})
    return RoundSeen(0, [], [], EnginesSeen(SPEED, 1, 0, 100.0), rewards=rewards)


def test_what_a_reward_costs_is_seen_where_it_is_waited_for() -> None:
    kept_up = graded(RewardSums(), RewardSums(100.0, 300.0))
    assert not remembered(LadderMemory(), kept_up).graders["judge"].measure.seconds_per_response
    waits = graded(RewardSums(80.0, 160.0), RewardSums(100.0, 220.0))
    memory = remembered(LadderMemory(), waits)
    assert memory.graders["judge"].waited.per_response == pytest.approx(2.0)
    slower = graded(RewardSums(80.0, 320.0), RewardSums(100.0, 440.0))
    assert 2.0 < remembered(memory, slower).graders["judge"].waited.per_response < 4.0
    took = remembered(memory, slower).graders["judge"].took
    assert took[41] == pytest.approx(100.0 * (1.0 + 0.5 ** (1.0 / 16.0)))
    assert memory_from_json(json.loads(json.dumps(memory_to_json(memory)))) == memory


def test_a_memory_of_layout_4_does_not_know_its_graders_yet() -> None:
    memory = LadderMemory()
    for seen in rounds(8, 1):
        memory = remembered(memory, seen)
    values = memory_to_json(memory)
    values["groups"] = [[*row][:-1] for row in values["groups"]]
    del values["graders"]
    assert memory_from_json({**values, "reward_seconds": 3.5}) == memory


def test_graders_that_have_become_faster_are_not_waited_for_as_before() -> None:
    waits = graded(RewardSums(80.0, 160.0), RewardSums(100.0, 220.0))
    memory = remembered(LadderMemory(), waits)
    for few in (graded(RewardSums(), RewardSums(5.0, 1.0)), kept_up(3.0)):  # says nothing
        assert remembered(memory, few).graders["judge"].waited.per_response == pytest.approx(2.0)
    assert remembered(memory, kept_up(0.5)).graders["judge"].waited.per_response == pytest.approx(
        0.5
    )


def test_a_round_that_shows_lower_costs_never_makes_unmeasured_ones_count() -> None:
    few = remembered(LadderMemory(), graded(RewardSums(3.0, 30.0), RewardSums(3.0, 30.0)))
    assert remembered(few, kept_up(0.5)).graders["judge"].measure.seconds_per_response == 0.0


def kept_up(seconds: float) -> RoundSeen:
    """A round whose graders had room all the time; `seconds`: for each of 100 responses."""
    return graded(RewardSums(), RewardSums(100.0, 100.0 * seconds))


def test_a_deferred_group_stays_with_its_kind_of_grader() -> None:
    draw = Draw(0, "x", (1, 2), level=1)
    lost = DeferredDraw(draw, (50, 60), (True, False))
    rewards = RewardsSeen({draw.id: "code"})
    engines = EnginesSeen(SPEED, 1, 0, 100.0)
    memory = remembered(LadderMemory(), RoundSeen(0, [], [lost], engines, rewards=rewards))
    assert memory.groups[draw.id].grader == "code"
    whole = TrainedGroup(draw.id, 0, (50, 90), 0)
    memory = remembered(memory, RoundSeen(1, [whole], [], engines, rewards=rewards))
    assert memory.groups[draw.id].complete
    assert memory.groups[draw.id].grader == "code"


def rounds(count: int, seed: int, *, same: float = 1.0) -> list[RoundSeen]:
    """Level 0 trains P0 of 2 * P0 groups; the others come back in the next round, each response
    with probability `same` at its length."""
    rng = random.Random(seed)

    def tokens() -> int:
        return CAP if rng.random() < 0.02 else rng.randint(10, 400)

    found: list[RoundSeen] = []
    for step in range(0, count, 2):
        rows = sorted(([tokens() for _ in range(R0)] for _ in range(2 * P0)), key=max)
        names = [DrawId(0, f"{step}-{number}") for number in range(2 * P0)]
        key = max(rows[P0 - 1])
        deferred = [
            DeferredDraw(
                Draw(*name, (), level=1, first_step=step),
                tuple(min(key, length) for length in row),
                tuple(length <= key for length in row),
            )
            for name, row in zip(names[P0:], rows[P0:], strict=True)
        ]
        again = [[t if rng.random() < same else t + 1 for t in row] for row in rows[P0:]]
        for number, trained, lost in (
            (step, zip(names, rows[:P0], strict=False), deferred),
            (step + 1, zip(names[P0:], again, strict=True), []),
        ):
            groups = [TrainedGroup(name, step, tuple(row), 0) for name, row in trained]
            speed = SpeedSums(60.0, SPEED.products, SPEED.targets)
            found.append(RoundSeen(number, groups, lost, EnginesSeen(speed, 2, 0, 20.0)))
    return found


def test_what_a_moved_group_carries_does_not_count_as_an_accepted_draft() -> None:
    seen = rounds(2, 0)
    all_carried = [replace(group, carried_tokens=10**6) for group in seen[1].trained]
    back = replace(seen[1], trained=all_carried)
    assert after([seen[0], back]).draft_tokens
    moved = replace(back, moved=frozenset(group.draw for group in all_carried))
    assert not after([seen[0], moved]).draft_tokens


def after(seen: list[RoundSeen], memory: LadderMemory | None = None) -> LadderMemory:
    memory = memory or LadderMemory()
    for round_ in seen:
        memory = remembered(memory, round_)
    return memory


def stored(memory: LadderMemory) -> LadderMemory:
    return memory_from_json(json.loads(json.dumps(memory_to_json(memory))))


@given(st.integers(0, 1000), st.integers(0, 30))
@settings(max_examples=8, deadline=None)
def test_a_restart_at_any_point_remembers_and_plans_the_same(seed: int, cut: int) -> None:
    seen = rounds(30, seed)
    whole = after(seen)
    resumed = after(seen[cut:], stored(after(seen[:cut])))
    assert resumed == whole == stored(whole)
    assert next_ladder(RULES, resumed, 32, [1.0], (2.0,)) == next_ladder(
        RULES, whole, 32, [1.0], (2.0,)
    )


def test_a_run_without_rounds_remembers_nothing() -> None:
    assert memory_from_json({}) == LadderMemory() == stored(LadderMemory())


def test_the_memory_does_not_grow_with_the_run() -> None:
    sizes = [len(after(rounds(count, 1)).groups) for count in (48, 200)]
    assert sizes[0] == pytest.approx(sizes[1], abs=2 * P0)


def test_of_too_many_groups_half_of_the_draws_are_forgotten_for_good() -> None:
    memory, most = LadderMemory(), 0
    for step in range(40):
        trained = [TrainedGroup(DrawId(0, f"{step}-{n}"), step, (5,), 0) for n in range(128)]
        memory = remembered(
            memory, RoundSeen(step, trained, [], EnginesSeen(SpeedSums(), 1, 0, 1.0))
        )
        most = max(most, len(memory.groups))
    assert (most <= 4000, memory.one_in) == (True, 2)
    by_step = Counter(group.first_step for group in memory.groups.values())
    assert set(by_step) == set(range(40))
    assert len(memory.groups) == pytest.approx(40 * 128 / 2, rel=0.2)


@pytest.mark.parametrize("same", [0.0, 0.5, 1.0])
def test_responses_that_ended_twice_are_compared(same: float) -> None:
    pairs = [item for (age, _), item in after(rounds(80, 3, same=same)).pairs.items() if age == 1]
    compared, equal = sum(item.compared for item in pairs), sum(item.same for item in pairs)
    assert equal / compared == pytest.approx(same, abs=0.1)


def test_a_draft_counts_by_the_tokens_that_need_no_decoding() -> None:
    seen = rounds(2, 1)
    had = sum(sum(item.response_tokens) for item in seen[0].deferred)
    taken = [replace(group, carried_tokens=10) for group in seen[1].trained]
    memory = after([seen[0], replace(seen[1], trained=taken)])
    assert memory.draft_tokens == {1: (had, 10.0 * P0)}


def test_responses_that_come_out_otherwise_end_the_deferral() -> None:
    """However fast it is: the trained lengths would not be those of the policy."""
    frozen, drifting = (after(rounds(60, 5, same=same)) for same in (1.0, 0.0))
    assert next_ladder(RULES, frozen, 60, [0.0], (2.0,)).factors
    assert next_ladder(RULES, drifting, 60, [0.0], (2.0,)).factors == ()


def test_a_choice_waits_until_enough_ends_of_responses_were_timed() -> None:
    seen = EnginesSeen(SPEED, 2, 0, 20.0)
    unknown = after([replace(rounds(2, 1)[0], engines=seen)])
    choice = next_ladder(RULES, unknown, 4, [], (1.5,))
    assert (choice.factors, choice.sizes) == ((1.5,), ())
    assert "2 ends of responses were timed" in choice.reason


@pytest.mark.parametrize(("weight_kv_tokens", "size"), [(1, 1), (4000, 2)])
def test_a_size_that_was_never_had_has_to_pay_by_itself(weight_kv_tokens: int, size: int) -> None:
    """Another ladder is better by far; at size 2, of which next to nothing is hoped, by a little
    more."""
    speed = SpeedSums()
    for number in range(80):
        running, kv = 1.0 + number % 8, 100.0 * (1 + number * 5 % 11)
        step = 0.02 + 1e-5 * running + 1e-6 * running * kv
        speed = speed.add((10.0, 10.0 * running, 10.0 * running * kv), 10.0 * step)
    engines = EnginesSeen(speed, 4, 0, 20.0, size=1, weight_kv_tokens=weight_kv_tokens)
    memory = after([replace(each, engines=engines) for each in rounds(24, 1)])
    rules = replace(RULES, largest_size=2)
    choice = next_ladder(rules, memory, 24, [1.0], (1.25,), (1, 1))
    assert choice.factors != (1.25,)
    assert set(choice.sizes) == {size}


def test_a_memory_of_the_layout_before_knows_the_speed_of_one_size() -> None:
    memory = after(rounds(6, 1))
    values = memory_to_json(memory)
    engines = values.pop("engines")
    (size, seen), *_ = engines["sizes"]
    speed = seen["speed"]
    values["speed"] = [speed["equations"], speed["products"], speed["targets"]]
    values |= {name: seen[name] for name in ("replicas", "kv_capacity")}
    values["prompt_tokens"] = engines["prompt_tokens"]
    read = memory_from_json(json.loads(json.dumps(values)))
    assert (size, read.engines.sizes) == (0, memory.engines.sizes)
    assert next_ladder(RULES, read, 6, [], (2.0,)) == next_ladder(RULES, memory, 6, [], (2.0,))


def test_a_policy_that_says_nothing_any_more_keeps_its_run_going() -> None:
    """Responses of no tokens: nothing to divide by."""
    seen = [
        replace(
            each,
            deferred=(),
            trained=[replace(group, response_tokens=(0,) * R0) for group in each.trained],
        )
        for each in rounds(24, 1)
    ]
    memory = replace(after(seen), engines=after(rounds(24, 1)).engines)
    assert len(next_ladder(RULES, memory, 24, [1.0], (1.5,)).factors) <= 3


def test_a_ladder_is_chosen_behind_each_long_round() -> None:
    kinds = [SHORT, SHORT, LONG, SHORT, SHORT, LONG, DRAIN]
    due = [step for step in range(8) if is_due(step, (1.5,), kinds[:step][::-1])]
    assert due == [3, 6]


def test_without_long_rounds_or_with_nothing_else_it_is_chosen_every_few_steps() -> None:
    climbing = [step for step in range(24) if is_due(step, (1.25, 1.25), [SHORT] * min(step, 16))]
    assert climbing == [16, 20]
    assert [step for step in range(9) if is_due(step, (), [LONG] * step)] == [4, 8]


def test_groups_are_weighed_once_enough_responses_have_ended_twice() -> None:
    whole = SeenGroup(0, (7, 3), True)
    cut = SeenGroup(0, (9, 9), False)
    groups = {DrawId(0, "a"): whole, DrawId(0, "b"): cut}
    for compared, is_known in ((15.0, False), (16.0, True)):
        pairs = {(1, 4): Pairs(compared, compared / 2, 20.0 * compared)}
        selection = selection_at(LadderMemory(groups, pairs=pairs), 5, {})
        assert (selection.unchanged is not None) == is_known
        assert (selection.step, selection.lengths) == (5, [3, 7])
