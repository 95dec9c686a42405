"""The rules by which a process that died is started again."""

from __future__ import annotations

from rollpacker.local_stack.restart_policy import RestartLimits, RestartPolicy

LIMITS = RestartLimits(
    count=3, window_seconds=60.0, first_delay_seconds=1.0, longest_delay_seconds=3.0
)


def test_each_further_death_doubles_the_wait_up_to_a_limit() -> None:
    policy = RestartPolicy(LIMITS)
    assert [policy.died(now) for now in (0.0, 1.0, 2.0)] == [1.0, 2.0, 3.0]


def test_more_deaths_than_allowed_within_the_window_give_up() -> None:
    policy = RestartPolicy(LIMITS)
    assert [policy.died(now) is None for now in (0.0, 10.0, 20.0, 59.0)] == [False] * 3 + [True]


def test_deaths_before_the_window_are_forgotten() -> None:
    policy = RestartPolicy(LIMITS)
    delays = [policy.died(now) for now in (0.0, 60.0, 120.0, 180.0, 240.0, 300.0)]
    assert delays == [1.0] * 6
