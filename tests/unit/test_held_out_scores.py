"""mean@k and pass@k of held-out measurements."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.types import (
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    ScoredResponse,
    Verdict,
)
from services.coordinator.held_out_scores import held_out_scores, pass_at_k


def group(*rewards: float | None, tokens: int = 3) -> PromptGroup:
    """A reward of 1 is correct; None was not graded."""
    scored = tuple(
        ScoredResponse(
            Response("", n, (0,) * tokens, (0.0,) * tokens, FinishReason.STOP, 0, 0, ()),
            reward,
            verdict=None
            if reward is None
            else Verdict.CORRECT
            if reward == 1
            else Verdict.INCORRECT,
        )
        for n, reward in enumerate(rewards)
    )
    return PromptGroup("r", 0, Draw(-1, "p", ()), (), scored, 0, tokens)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_correct_one(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    choices = list(itertools.combinations(outcomes, k))
    expected = sum(map(any, choices)) / len(choices)
    assert math.isclose(pass_at_k(len(outcomes), sum(outcomes), k), expected)


@pytest.mark.parametrize("chance", [0.1, 0.5])
def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not(chance):
    n, k = 6, 3
    weights = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - chance) ** k
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert math.isclose(mean, truth)
    assert plug_in < truth - 0.01


@pytest.mark.parametrize(("graded", "correct", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1)])
def test_impossible_counts_are_refused(graded, correct, k):
    with pytest.raises(ValueError, match=f"k: {k} of {graded}"):
        pass_at_k(graded, correct, k)


def test_the_scores_of_a_set_with_greedy_responses():
    sampled = [group(1.0, 0.0, 0.0, 0.0), group(1.0, 1.0, 0.0, 0.0, tokens=5)]
    scores = held_out_scores(sampled, [group(1.0), group(0.0)], 4)
    assert scores == {
        "count": 8.0,
        "response_tokens": 4.0,
        "accuracy": 3 / 8,
        "mean@4": 3 / 8,
        "pass@1": 3 / 8,
        "pass@2": statistics.fmean([1 / 2, 5 / 6]),
        "pass@4": 1.0,
        "greedy_count": 2.0,
        "greedy_response_tokens": 3.0,
        "greedy_accuracy": 0.5,
    }


def test_a_response_without_a_reward_is_neither_right_nor_wrong():
    scores = held_out_scores([group(1.0, None), group(0.0, 0.0)], [], 2)
    assert (scores["count"], scores["accuracy"], scores["mean@2"]) == (3.0, 1 / 3, 0.5)
    assert scores["pass@1"] == 0.5
    assert scores["pass@2"] == 0.0  # of the one prompt that has two graded responses
    nothing = held_out_scores([group(None)], [], 1)
    assert nothing == {"count": 0.0, "response_tokens": 3.0}


def test_a_partial_reward_counts_for_the_mean_and_not_for_pass_at_k():
    scores = held_out_scores([group(0.5, 0.5)], [], 2)
    assert (scores["mean@2"], scores["pass@2"]) == (0.5, 0.0)
