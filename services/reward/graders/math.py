"""The mathematics grader: reads the final answer, compares it with the reference.

reference_json: {"answer": "42"}, optionally with
  "answer_after": "=", the answer is what follows the only occurrence of this text;
  "tolerance": 0.01, how far two numbers may differ, absolutely (default 0: exactly equal).

Text rules and exact arithmetic decide most answers in microseconds (`comparison`); what needs
algebra goes to a worker (`algebra`). Model text is parsed by grammars only, never evaluated.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from services.reward.graders import extraction
from services.reward.graders.answers import readings
from services.reward.graders.comparison import Comparison, NeedsAlgebraError, NoAlgebra
from services.reward.graders.grader import (
    NO_ANSWER,
    BadReferenceError,
    GradingTask,
    PlainGrader,
    Score,
    verdict_score,
)

if TYPE_CHECKING:
    from services.reward.graders.comparison import Algebra

_KEYS = ("answer", "answer_after", "tolerance")
_TOLERANCE = re.compile(r"\d{1,20}(?:\.\d{1,20})?(?:[eE][-+]?\d{1,2})?")
_NO_ALGEBRA = NoAlgebra()


@dataclass(frozen=True, slots=True)
class MathReference:
    """What the answer is compared with, and how."""

    answer: str
    answer_after: str = ""
    tolerance: Fraction = Fraction(0)


class MathGrader(PlainGrader):
    """See the module."""

    def __init__(self) -> None:
        self._algebra: Algebra | None = None

    def _load(self) -> None:
        from services.reward.graders.algebra import SympyAlgebra

        algebra = SympyAlgebra()
        algebra.load()
        self._algebra = algebra

    def check_reference(self, reference_json: str) -> None:
        parse_reference(reference_json)

    def grade_now(self, task: GradingTask) -> Score | None:
        try:
            return _grade(task, _NO_ALGEBRA)
        except NeedsAlgebraError:
            return None

    def grade(self, task: GradingTask) -> Score:
        if self._algebra is None:
            self._load()
        assert self._algebra is not None
        return _grade(task, self._algebra)


def _grade(task: GradingTask, algebra: Algebra) -> Score:
    reference = parse_reference(task.reference_json)
    if reference.answer_after:
        answer = extraction.only_answer_after(task.response_text, reference.answer_after)
    else:
        answer = extraction.final_answer(task.response_text)
    if answer is None or not readings(answer):
        return NO_ANSWER
    comparison = Comparison(algebra, reference.tolerance)
    return verdict_score(comparison.same_text(reference.answer, answer), answer)


@lru_cache(maxsize=4096)
def parse_reference(reference_json: str) -> MathReference:
    """Read reference_json. Raises BadReferenceError."""
    values = parse_object(reference_json)
    unknown = sorted(values.keys() - set(_KEYS))
    if unknown:
        raise BadReferenceError(f"{unknown[0]}: unknown key; math knows {', '.join(_KEYS)}")
    answer = values.get("answer")
    if not isinstance(answer, str) or not readings(answer):
        raise BadReferenceError(
            f'answer: {answer!r} is no answer; write {{"answer": "42"}} with text or a number'
        )
    after = values.get("answer_after", "")
    if not isinstance(after, str):
        raise BadReferenceError(f"answer_after: {after!r} is not text")
    return MathReference(answer, after, _tolerance(values.get("tolerance", "0")))


def parse_object(reference_json: str) -> dict[str, Any]:
    """A JSON object with its numbers as the text they are written in, so that none is rounded."""
    try:
        values = json.loads(reference_json, parse_float=str, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise BadReferenceError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadReferenceError(f'must be an object such as {{"answer": "42"}}, not {values!r:.40}')
    return values


def _tolerance(text: Any) -> Fraction:
    if isinstance(text, str) and _TOLERANCE.fullmatch(text):
        return Fraction(text)
    raise BadReferenceError(f"tolerance: {text!r} is not a number >= 0, such as 0.01")
