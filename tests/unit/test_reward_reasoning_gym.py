"""reasoning-gym's scorers: full scores only, and no reward where a scorer fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
import reasoning_gym

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import BadReferenceError, GraderFailedError, GradingTask
from services.reward.graders.reasoning_gym import ReasoningGymGrader, extract

GRADER = ReasoningGymGrader()


def entry(dataset: str) -> dict[str, Any]:
    return dict(reasoning_gym.create_dataset(dataset, size=1, seed=1)[0])


def task(dataset: str, response: str) -> GradingTask:
    reference = json.dumps({"dataset": dataset, "entry": entry(dataset)}, default=str)
    return GradingTask(GraderKind.REASONING_GYM, response, reference)


@pytest.mark.parametrize("dataset", ["gcd", "chain_sum", "basic_arithmetic", "lcm"])
def test_the_reference_answer_is_correct(dataset: str) -> None:
    answer = entry(dataset)["answer"]
    for response in (answer, f"<think>hm</think><answer>{answer}</answer>", f"Answer: {answer}"):
        score = GRADER.grade(task(dataset, response))
        assert (score.reward, score.verdict) == (1.0, Verdict.CORRECT)


def test_a_partial_score_is_no_reward_and_is_kept_in_the_breakdown() -> None:
    score = GRADER.grade(task("gcd", "answer: 1000000007 or so"))
    assert (score.reward, score.verdict) == (0.0, Verdict.INCORRECT)
    assert 0.0 <= score.breakdown["score"] < 1.0


@pytest.mark.parametrize("response", ["", "<think>7", "<answer>7", "<answer> </answer>"])
def test_no_answer_is_never_shown_to_a_scorer(response: str) -> None:
    assert extract(response) is None
    score = GRADER.grade_now(task("gcd", response))
    assert score is not None
    assert score.verdict is Verdict.NO_ANSWER


def test_a_scorer_that_raises_gives_no_reward_and_is_named() -> None:
    with pytest.raises(GraderFailedError, match="prime_factorization raised ValueError"):
        GRADER.grade(task("prime_factorization", "seven"))


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        ("{", "JSON"),
        ("{}", "dataset"),
        ('{"dataset": 1, "entry": {"answer": "1"}}', "dataset"),
        ('{"dataset": "gcd", "entry": {}}', "entry"),
        ('{"dataset": "gcd", "entry": {"answer": "1"}, "more": 1}', "must be"),
    ],
)
def test_an_unusable_reference_is_an_error_that_says_why(reference: str, what: str) -> None:
    with pytest.raises(BadReferenceError, match=what):
        GRADER.check_reference(reference)


def test_an_unknown_data_set_is_an_error_that_names_it() -> None:
    reference = json.dumps({"dataset": "gdc", "entry": {"answer": "1"}})
    with pytest.raises(BadReferenceError, match="gdc"):
        GRADER.grade(GradingTask(GraderKind.REASONING_GYM, "1", reference))
