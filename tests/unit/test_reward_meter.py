"""The reward meter: what a response costs where graders are what is waited for."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.reward_meter import RewardMeter, RewardSums


@given(st.integers(1, 8), st.integers(60, 200), st.floats(0.1, 5.0), st.integers(0, 1000))
def test_of_graders_that_cannot_keep_up_it_reads_what_a_response_costs(
    slots: int, count: int, seconds: float, seed: int
) -> None:
    """`slots` graders that take `seconds` each, however irregularly responses are asked for."""
    rng = random.Random(seed)
    asked_at = sorted(rng.uniform(0.0, 0.5 * seconds) for _ in range(count))
    free, answers = [0.0] * slots, []
    for at in asked_at:
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + seconds)
        answers.append(start + seconds)
    events = sorted([(at, 1) for at in asked_at] + [(at, -1) for at in answers])
    meter, asked = RewardMeter(), 0
    for at, change in events:
        asked += change
        if change < 0:
            meter.answered("judge")
        meter.looked(at, "judge", asked, 2 * slots)
    speed = meter.speeds["judge"]
    assert speed.busy.responses == count
    assert 0.0 < speed.waited.responses <= count
    assert speed.waited.per_response == pytest.approx(seconds / slots, rel=0.2)
    assert speed.busy.per_response >= 0.9 * seconds / slots


def test_nothing_is_waited_for_while_all_that_is_asked_for_is_worked_on() -> None:
    meter = RewardMeter()
    for at in range(50):
        meter.looked(at, "math", 4, 4)
        meter.answered("math")
    meter.looked(50.0, "math", 0, 4)
    speed = meter.speeds["math"]
    assert speed.waited == RewardSums()
    assert speed.busy.per_response == pytest.approx(1.0)


def test_the_time_in_which_nothing_was_asked_for_does_not_count() -> None:
    meter = RewardMeter()
    for start in (0.0, 1000.0):
        meter.looked(start, "code", 1, 2)
        meter.answered("code")
        meter.looked(start + 3.0, "code", 0, 2)
    assert meter.speeds["code"].busy == RewardSums(2, 6.0)


def test_where_nobody_knows_what_graders_can_do_nothing_is_waited_for() -> None:
    meter = RewardMeter()
    meter.looked(0.0, "judge", 900, 0)
    meter.answered("judge")
    meter.looked(1.0, "judge", 899, 0)
    assert meter.speeds["judge"].waited == RewardSums()
