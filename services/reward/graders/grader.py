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
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollpacker.types import GraderKind, Verdict


class BadReferenceError(ValueError):
    """reference_json cannot be used; the message names the key, its value and the fix."""


class GraderFailedError(Exception):
    """The scorer itself failed; the message names it. There is no reward, not a reward of 0."""


class GraderUnavailableError(Exception):
    """This host cannot offer the grader; the message says why and which knob to turn."""


class GradingLostError(Exception):
    """No score came this time, through no fault of the response that can be told; try again."""


@dataclass(frozen=True, slots=True)
class GradingTask:
    """One response to score."""

    grader_kind: GraderKind
    response_text: str
    reference_json: str
    prompt_text: str = ""
    # Largest CPU time of a correct run so far, in seconds, by test case; for graders that run code.
    time_anchors: Mapping[str, float] = field(default_factory=dict)
    only_case: str = ""  # run this test case alone; default: all


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """A program to run, with nothing to compare."""

    source: str
    stdin: str
    cpu_seconds: float
    memory_bytes: int  # of address space


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What a program did; its output is whatever it wrote, cut where it wrote too much."""

    ended_by: str  # exit, signal, cpu, wall, output or threads
    code: int  # exit code, or minus the signal
    stdout: str
    stderr: str
    cpu_seconds: float
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of one test case."""

    __test__ = False  # pytest: no tests in here

    name: str  # of the test case, within its reference
    verdict: Verdict
    cpu_seconds: float
    wall_seconds: float
    limit_seconds: float  # of CPU time; more is TIMED_OUT


@dataclass(frozen=True, slots=True)
class Score:
    """How grading ended. Raises ValueError for a reward that is not finite or out of its range."""

    reward: float
    verdict: Verdict
    extracted_answer: str = ""  # as read from the response; for logs
    breakdown: Mapping[str, float] = field(default_factory=dict)  # parts of the reward; for logs
    runs: tuple[TestRun, ...] = ()  # of test cases, in order; of graders that run code
    reward_range: tuple[float, float] = (0.0, 1.0)  # as declared

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if not (math.isfinite(self.reward) and low <= self.reward <= high):
            raise ValueError(f"reward: {self.reward} is not a finite number in [{low}, {high}]")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all runs of test cases."""
        return sum((run.cpu_seconds for run in self.runs), 0.0)

    @property
    def wall_seconds(self) -> float:
        """Wall time of all runs of test cases."""
        return sum((run.wall_seconds for run in self.runs), 0.0)


class PlainGrader(ABC):
    """The part of a grader that most share: under the seal, no settings, nothing to prepare."""

    sealed = True
    keeps_own_limits = False
    late_is_verdict = True

    def load(self, settings: Mapping[str, Any]) -> None:
        """Takes no settings."""
        del settings
        self._load()

    @abstractmethod
    def _load(self) -> None:
        """As `Grader.load`."""

    def prepare(self) -> None:  # noqa: B027  most have nothing to prepare
        """Nothing."""


class Grader(Protocol):
    """One grader. Nothing of a response is kept between two calls."""

    @property
    def sealed(self) -> bool:
        """Whether `grade` runs in a sealed worker: it evaluates no text and needs no process,
        socket or written file of its own."""
        ...

    @property
    def keeps_own_limits(self) -> bool:
        """Whether `grade` bounds its own time; else the pool's time limit does."""
        ...

    @property
    def late_is_verdict(self) -> bool:
        """Whether the pool's time limit is the response's fault: TIMED_OUT, else no reward."""
        ...

    def load(self, settings: Mapping[str, Any]) -> None:
        """Import what `grade` needs; may take seconds. Called once in each worker.

        Raises GraderUnavailableError.
        """
        ...

    def prepare(self) -> None:
        """Called after each reply: start what the next `grade` needs. Raises GradingLostError."""
        ...

    def check_reference(self, reference_json: str) -> None:
        """Raise BadReferenceError when the reference is unusable, as far as that is quick."""
        ...

    def grade_now(self, task: GradingTask) -> Score | None:
        """The score when it takes microseconds, else None. Raises BadReferenceError."""
        ...

    def grade(self, task: GradingTask) -> Score:
        """The score. Raises BadReferenceError, GraderFailedError, GradingLostError."""
        ...


def verdict_score(correct: bool, extracted_answer: str) -> Score:
    """1 for a right answer, 0 for a wrong one."""
    if correct:
        return Score(1.0, Verdict.CORRECT, extracted_answer)
    return Score(0.0, Verdict.INCORRECT, extracted_answer)


NO_ANSWER = Score(0.0, Verdict.NO_ANSWER)
