"""The scorers of reasoning-gym (extra `reasoning-gym`), by data set name.

reference_json: {"dataset": "gcd", "entry": {...}}, where the entry is what the data set gave for
this prompt (question, answer, metadata). The answer is what stands in the last `<answer>` tag
after the thinking, else the final answer as the mathematics grader reads it, else the whole
response. reasoning-gym gives partial scores; only a full score of 1 is a reward, the raw score is
kept in the breakdown.

Some scorers raise on an answer that they cannot read, and some evaluate it as Python, which a
worker refuses: neither gets a reward, nor a 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from services.reward.graders import extraction
from services.reward.graders.grader import (
    NO_ANSWER,
    BadReferenceError,
    GraderFailedError,
    GradingTask,
    PlainGrader,
    Score,
    verdict_score,
)
from services.reward.graders.seal import EvaluationRefusedError

_KEYS = ("dataset", "entry")
_EXAMPLE = '{"dataset": "gcd", "entry": {"question": ..., "answer": ..., "metadata": ...}}'
_OPEN, _CLOSE = "<answer>", "</answer>"
_FULL_SCORE = 1.0


class ReasoningGymGrader(PlainGrader):
    """See the module."""

    def _load(self) -> None:
        import reasoning_gym  # noqa: F401  takes a second, and must not count as grading

    def check_reference(self, reference_json: str) -> None:
        _parse(reference_json)

    def grade_now(self, task: GradingTask) -> Score | None:
        _parse(task.reference_json)
        return NO_ANSWER if extract(task.response_text) is None else None

    def grade(self, task: GradingTask) -> Score:
        dataset, entry = _parse(task.reference_json)
        answer = extract(task.response_text)
        if answer is None:
            return NO_ANSWER
        raw = _call(dataset, answer, entry)
        score = verdict_score(raw >= _FULL_SCORE, answer)
        return Score(score.reward, score.verdict, answer, {"score": raw})


def extract(response: str) -> str | None:
    """The answer in a response, None when there is none."""
    rest = extraction.after_thinking(response)
    if rest is None:
        return None
    _, tag, tail = rest.rpartition(_OPEN)
    if tag:
        answer, closed, _ = tail.partition(_CLOSE)
        return (answer.strip() or None) if closed else None
    return extraction.final_answer(response) or rest.strip() or None


def _call(dataset: str, answer: str, entry: dict[str, Any]) -> float:
    scorer = _scorer(dataset)
    try:
        score = scorer(answer=answer, entry=entry)
    except (EvaluationRefusedError, MemoryError):
        raise
    except Exception as error:
        raise GraderFailedError(
            f"reasoning_gym scorer {dataset} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise GraderFailedError(f"reasoning_gym scorer {dataset} returned {score!r}, not a number")
    return float(score)


@lru_cache(maxsize=128)
def _scorer(dataset: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise BadReferenceError(
            f"dataset: {dataset!r} is unknown to reasoning_gym; see reasoning_gym.factory.DATASETS"
        )
    scorer: Callable[..., float] = get_score_answer_fn(dataset)
    return scorer


@lru_cache(maxsize=1024)
def _parse(reference_json: str) -> tuple[str, dict[str, Any]]:
    try:
        values = json.loads(reference_json)
    except (ValueError, RecursionError) as error:
        raise BadReferenceError(f"is not JSON: {error}") from error
    if not isinstance(values, dict) or values.keys() != set(_KEYS):
        raise BadReferenceError(f"must be {_EXAMPLE}, not {values!r:.80}")
    dataset, entry = values["dataset"], values["entry"]
    if not isinstance(dataset, str):
        raise BadReferenceError(f"dataset: {dataset!r} is not a name")
    if not isinstance(entry, dict) or "answer" not in entry:
        raise BadReferenceError(f"entry: {entry!r:.80} is no entry of a data set; see {_EXAMPLE}")
    return dataset, entry
