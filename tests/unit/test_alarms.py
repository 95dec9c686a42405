"""Alarms: each rule holds where it should, and nowhere in a healthy run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import pytest

from rollpacker.policy.alarms import ALARMS, PREFIX, WINDOW, find_alarm, raised_alarms
from rollpacker.store.run_store import RunStore
from rollpacker.types import RoundKind, StepRecord
from services.coordinator.alarm_watch import AlarmWatch
from tests.unit.outputs_example_run import ExampleRun

HEALTHY = {
    "reward/mean": 0.4,
    "reward/zero_variance_share": 0.3,
    "response_length/capped_share": 0.1,
    "response_length/loop_share": 0.0,
    "trainer/mismatch_kl": 1e-4,
    "bias/weighed_ratio": 0.98,
}


def records(values: Sequence[float], metric: str) -> list[StepRecord]:
    """A run in which one metric takes these values and the others are healthy."""
    return [record(step, HEALTHY | {metric: value}) for step, value in enumerate(values)]


def record(step: int, metrics: dict[str, float]) -> StepRecord:
    return StepRecord(step, RoundKind.SHORT, 0, 0.0, 1.0, 2.0, step + 1, (), metrics)


def names(run: Sequence[StepRecord]) -> list[str]:
    return [alarm.name for alarm in raised_alarms(run)]


@pytest.mark.parametrize(
    ("alarm", "metric", "bad", "good"),
    [
        ("no_reward", "reward/mean", [0.0] * 3, [0.0, 0.0, 0.01]),
        ("truncated", "response_length/capped_share", [0.9] * 3, [0.9, 0.1, 0.1]),
        ("zero_variance", "reward/zero_variance_share", [0.95] * 3, [0.9] * 3),
        ("mismatch_rising", "trainer/mismatch_kl", [2e-3] * 6 + [9e-3] * 5, [2e-3] * 12),
        ("length_bias", "bias/weighed_ratio", [0.7] * WINDOW, [0.7] * (WINDOW - 1) + [0.95]),
        ("token_loops", "response_length/loop_share", [0.2] * 3, [0.0, 0.0, 0.1]),
    ],
)
def test_an_alarm_is_raised_while_its_rule_holds(
    alarm: str, metric: str, bad: list[float], good: list[float]
) -> None:
    assert names(records(bad, metric)) == [alarm]
    assert names(records(good, metric)) == []


def test_one_step_alone_raises_nothing() -> None:
    worst = dict.fromkeys(HEALTHY, 0.0) | {"response_length/capped_share": 1.0}
    assert names([record(0, worst)]) == []


def test_a_mismatch_that_is_tiny_may_rise() -> None:
    assert names(records([1e-9] * 6 + [1e-7] * 6, "trainer/mismatch_kl")) == []


def test_a_young_ladder_may_be_biased() -> None:
    assert names(records([0.7] * (WINDOW - 1), "bias/weighed_ratio")) == []


def test_a_healthy_run_raises_no_alarm() -> None:
    run = [step for step, _ in ExampleRun().steps(60)]
    assert [names(run[:end]) for end in range(1, len(run))] == [[]] * (len(run) - 1)


def test_every_alarm_says_what_to_do() -> None:
    assert all(alarm.meaning and alarm.remedy for alarm in ALARMS)
    assert find_alarm(f"{PREFIX}no_reward") is ALARMS[0]
    assert find_alarm("reward/mean") is None


class Records:
    """The records of a run, as the store has them."""

    def __init__(self) -> None:
        self.kept: list[StepRecord] = []

    async def records_before(self, step: int, count: int) -> list[StepRecord]:
        return [one for one in reversed(self.kept) if one.step < step][:count]


async def test_an_alarm_is_a_metric_of_its_steps_and_logged_when_it_begins_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watch = AlarmWatch(cast(RunStore, Records()))
    run = [await watch.checked(one) for one in records([0.0] * 4 + [0.5], "reward/mean")]
    raised = [PREFIX + "no_reward" in one.metrics for one in run]
    assert raised == [False, False, True, True, False]
    said = [line.getMessage().partition(":")[0] for line in caplog.records]
    assert said == ["alarm no_reward from step 2 on", "alarm no_reward is over at step 4"]


async def test_a_run_that_goes_on_or_rewinds_is_watched_by_the_records_that_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Records()
    store.kept = records([0.0] * 10 + [0.4] * 10, "reward/mean")
    watch = AlarmWatch(cast(RunStore, store))
    goes_on = await watch.checked(record(20, HEALTHY | {"reward/mean": 0.0}))
    assert PREFIX + "no_reward" not in goes_on.metrics  # steps 16 to 19 had rewards
    store.kept = records([0.0] * 5, "reward/mean")
    rewound = await watch.checked(record(5, HEALTHY | {"reward/mean": 0.0}))
    assert PREFIX + "no_reward" in rewound.metrics
    assert caplog.records == []  # it was raised before the rewind's end: it has been said
