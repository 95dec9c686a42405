"""What a grader is: a pure function from a response and its reference to a score.

A grader has two halves. `grade_now` runs in the service's event loop: it is bounded to well under a
millisecond and answers None when it cannot decide in that. `grade` decides everything and may be
slow, eat memory or crash: it runs in a grading worker only, which has a time limit.

A wrong answer is a Score. The two errors here say that no score could be given: the reference is
unusable (the caller's fault), or the scorer failed (nobody knows the right reward, so none is made
up).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollpacker.types import GraderKind, Verdict


class BadReferenceError(ValueError):
    """reference_json cannot be used; the message names the key, its value and the fix."""


class GraderFailedError(Exception):
    """The scorer itself failed; the message names it. There is no reward, not a reward of 0."""


@dataclass(frozen=True, slots=True)
class GradingTask:
    """One response to score."""

    grader_kind: GraderKind
    response_text: str
    reference_json: str
    prompt_text: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """How grading ended. Raises ValueError for a reward that is not a finite number in [0, 1]."""

    reward: float
    verdict: Verdict
    extracted_answer: str = ""  # as read from the response; for logs
    breakdown: Mapping[str, float] = field(default_factory=dict)  # parts of the reward; for logs

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and 0.0 <= self.reward <= 1.0):
            raise ValueError(f"reward: {self.reward} is not a finite number in [0, 1]")


class Grader(Protocol):
    """One grader. Nothing is kept between two calls."""

    def load(self) -> None:
        """Import what `grade` needs; may take seconds. Called once in each worker."""
        ...

    def check_reference(self, reference_json: str) -> None:
        """Raise BadReferenceError when the reference is unusable, as far as that is quick."""
        ...

    def grade_now(self, task: GradingTask) -> Score | None:
        """The score when it takes microseconds, else None. Raises BadReferenceError."""
        ...

    def grade(self, task: GradingTask) -> Score:
        """The score. Raises BadReferenceError, GraderFailedError."""
        ...


def verdict_score(correct: bool, extracted_answer: str) -> Score:
    """1 for a right answer, 0 for a wrong one."""
    if correct:
        return Score(1.0, Verdict.CORRECT, extracted_answer)
    return Score(0.0, Verdict.INCORRECT, extracted_answer)


NO_ANSWER = Score(0.0, Verdict.NO_ANSWER)
