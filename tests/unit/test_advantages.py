"""Advantages of every estimator: against formulas of their own, and what must not hurt a group."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.algorithms import ALGORITHMS, Estimator
from rollpacker.policy.advantages import AdvantageRules, OverlongShaping, group_advantages
from rollpacker.settings import parse_run_settings
from services.coordinator.modes import advantage_rules, tail_batching_rules

REWARDS = [0.0, 0.25, 1.0, 1.0]
RULES = {estimator: AdvantageRules(estimator, deviation=0.25) for estimator in Estimator}
every_estimator = pytest.mark.parametrize("rules", RULES.values(), ids=lambda r: r.estimator.value)
rewards_and_tokens = st.lists(
    st.tuples(st.none() | st.floats(0, 1), st.integers(0, 3)), max_size=12
).map(lambda rows: ([row[0] for row in rows], [row[1] for row in rows]))


def of_whole_responses(rules, rewards):
    return group_advantages(rules, rewards, [5] * len(rewards))


def test_standardised_is_distance_from_the_mean_in_deviations():
    deviation = statistics.pstdev(REWARDS)
    expected = [(r - 0.5625) / (deviation + 1e-6) for r in REWARDS]
    assert of_whole_responses(RULES[Estimator.STANDARDISED], REWARDS) == pytest.approx(expected)


def test_centred_is_distance_from_the_mean():
    expected = [r - 0.5625 for r in REWARDS]
    assert of_whole_responses(RULES[Estimator.CENTRED], REWARDS) == pytest.approx(expected)


def test_leave_one_out_is_distance_from_the_mean_of_the_others():
    expected = [
        reward - statistics.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, reward in enumerate(REWARDS)
    ]
    assert of_whole_responses(RULES[Estimator.LEAVE_ONE_OUT], REWARDS) == pytest.approx(expected)


def test_scaled_divides_by_the_declared_deviation_alone():
    expected = [(r - 0.5625) / 0.25 for r in REWARDS]
    assert of_whole_responses(RULES[Estimator.SCALED], REWARDS) == pytest.approx(expected)


@every_estimator
@given(rewards_and_tokens)
def test_advantages_are_finite_and_sum_to_zero_and_an_uncounted_response_has_none(rules, group):
    rewards, tokens = group
    advantages = group_advantages(rules, rewards, tokens)
    assert len(advantages) == len(rewards)
    assert all(math.isfinite(advantage) for advantage in advantages)
    assert sum(advantages) == pytest.approx(0, abs=1e-5)
    for advantage, reward, count in zip(advantages, rewards, tokens, strict=True):
        assert advantage == 0 or (reward is not None and count > 0)


@every_estimator
@pytest.mark.parametrize(
    ("rewards", "tokens"),
    [
        ([0.0, 0.0, 10.0], [4, 7, 0]),  # the empty response took the reward
        ([100.0, 1.0], [0, 2]),
        ([7.0], [3]),
        ([None, 1.0], [3, 3]),
        ([None, None], [3, 3]),
        ([1.0, 1.0, 1.0], [1, 2, 3]),
        ([1.0, 0.0], [0, 0]),
        ([], []),
    ],
)
def test_a_group_without_two_different_rewards_of_real_responses_has_no_advantage(
    rules, rewards, tokens
):
    assert group_advantages(rules, rewards, tokens) == [0.0] * len(rewards)


@every_estimator
def test_a_missing_reward_and_an_empty_response_are_left_out_of_the_statistics(rules):
    with_gaps = group_advantages(rules, [1.0, None, 0.0, 50.0], [2, 2, 2, 0])
    assert [with_gaps[0], with_gaps[2]] == of_whole_responses(rules, [1.0, 0.0])


def test_overlong_shaping_takes_the_penalty_linearly_over_the_buffer():
    shaping = OverlongShaping(cap_tokens=100, buffer_tokens=20, penalty=0.5)
    lengths = [1, 80, 85, 90, 100]
    assert [shaping.shaped(1.0, n) for n in lengths] == pytest.approx([1, 1, 0.875, 0.75, 0.5])


def test_overlong_shaping_comes_before_the_statistics_of_the_group():
    rules = AdvantageRules(Estimator.CENTRED, overlong=OverlongShaping(100, 20, 0.5))
    assert group_advantages(rules, [1.0, 1.0], [10, 90]) == pytest.approx([0.125, -0.125])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_names_an_algorithm_and_its_rounds_compute_its_advantages(algorithm):
    trainer = {"algorithm": algorithm, "overlong_buffer_tokens": 16, "overlong_penalty": 0.5}
    if algorithm == "reinforce_plus_plus":
        trainer["advantage_deviation"] = 0.4
    settings = parse_run_settings({"model": "m", "data": {"path": "d"}, "trainer": trainer})
    rules = advantage_rules(settings)
    assert rules.estimator is ALGORITHMS[algorithm].estimator
    assert rules.deviation == (0.4 if algorithm == "reinforce_plus_plus" else 1.0)
    assert rules.overlong == OverlongShaping(1024, 16, 0.5)
    assert tail_batching_rules(settings).advantages == rules
