"""The ages of a ladder's draws are those that `plan` gives them."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.ladder_ages import level_ages
from rollpacker.policy.tail_batching import Backlog, TailBatchingRules, plan
from rollpacker.types import Draw

FACTORS = st.lists(st.sampled_from([1.25, 1.5, 1.75, 2.0]), max_size=3).map(tuple)


def planned_ages(factors: tuple[float, ...], prompts: int) -> list[Counter[int]]:
    """Of the draws that `plan` launches, by level, up to the fourth round of the last one."""
    rules = TailBatchingRules(prompts, 1, factors, max_deferral_age=1000)
    seen: list[Counter[int]] = [Counter() for _ in range(len(factors) + 1)]
    queue: list[Draw] = []
    last_rounds = 0
    for step in range(200):
        planned = plan(rules, Backlog(step, tuple(queue), 10**6))
        assert planned is not None
        new = [
            Draw(0, f"{step}-{number}", (), first_step=step)
            for number in range(planned.new_prompts)
        ]
        launched = [*planned.queued, *new]
        seen[planned.level].update(draw.age(step) for draw in launched)
        last_rounds += planned.level == len(factors)
        if last_rounds == 4:
            return seen
        taken = {draw.id for draw in planned.queued}
        mixed = sorted(launched, key=lambda draw: zlib.crc32(draw.prompt_id.encode()))
        lost = mixed[prompts:]  # draws of all ages lose alike
        queue = [draw for draw in queue if draw.id not in taken]
        queue += [dataclasses.replace(draw, level=planned.level + 1) for draw in lost]
    return seen


@given(FACTORS)
@settings(max_examples=10, deadline=None)
def test_they_are_those_of_the_planned_rounds(factors: tuple[float, ...]) -> None:
    for ages, planned in zip(level_ages(factors, 64), planned_ages(factors, 64), strict=True):
        if not planned:
            assert ages == {math.inf: 1.0}
            continue
        total = sum(planned.values())
        mean = sum(age * count for age, count in planned.items()) / total
        assert sum(age * share for age, share in ages.items()) == pytest.approx(mean, rel=0.2)
        assert sum(ages.values()) == pytest.approx(1.0)


def test_a_short_cycle_keeps_draws_young() -> None:
    assert level_ages((2.0,), 128)[1] == {1: 1.0}
    assert level_ages((1.5,), 128)[1] == {1: 0.5, 2: 0.5}
    assert max(level_ages((2.0, 2.0, 2.0), 128)[3]) == 7
