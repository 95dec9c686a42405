"""Whether two answers are the same, by their types; algebra is asked only when they do not decide.

Rules: numbers are equal exactly or within the declared tolerance. The brackets of a pair count (an
open end is not a closed one); those of longer tuples do not. Sets and unions have no order, tuples
and matrices do; a bare list has none against a set or another bare list, unless it has dots.
`x = 5` is 5 where the other side is no relation. Two relations are the same when one is a multiple
of the other. Words are compared as text.

`Algebra` is the seam to the slow half: `NoAlgebra` refuses, so that the quick path stops there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from services.reward.graders.answers import (
    Answer,
    Collection,
    Expression,
    Matrix,
    Relation,
    Union,
    Words,
    readings,
)
from services.reward.graders.numbers import Number, same_number

_NAME = re.compile(r"\\?[A-Za-z' ]+(?:_\{?\w+\}?)?(?:\([a-z]\))?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")


class NeedsAlgebraError(Exception):
    """The types do not decide, and there is no algebra here."""


class Algebra(Protocol):
    """Decides about expressions, given as normalised text; may take long."""

    def same_value(self, reference: str, answer: str, tolerance: Fraction, /) -> bool: ...

    def same_relation(self, reference: Relation, answer: Relation, /) -> bool: ...


class NoAlgebra:
    """Refuses every question."""

    def same_value(self, *_: object) -> bool:
        raise NeedsAlgebraError

    def same_relation(self, *_: object) -> bool:
        raise NeedsAlgebraError


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way to compare: who does the algebra, and how far decimals may differ."""

    algebra: Algebra
    tolerance: Fraction = Fraction(0)

    def same_text(self, reference: str, answer: str) -> bool:
        """Whether two answers as written are the same, in any of their readings."""
        answers = readings(answer)
        return any(self.same(left, right) for left in readings(reference) for right in answers)

    def same(self, reference: Answer, answer: Answer) -> bool:
        """Whether two answers are the same."""
        match reference, answer:
            case Number(), Number():
                return same_number(reference, answer, self.tolerance)
            case (Collection(), Collection()):
                return self._same_collection(reference, answer)
            case (Union() | Collection("") as left, Union() | Collection("") as right):
                return self._same_unordered(_parts(left), _parts(right))
            case (Matrix(), Matrix()):
                return self._same_matrix(reference, answer)
            case (Relation(), Relation()):
                return reference == answer or self.algebra.same_relation(reference, answer)
            case (Relation("=", left, right), _) if _names_a_value(left):
                return self.same_parts(right, answer)
            case (_, Relation("=", left, right)) if _names_a_value(left):
                return self.same_parts(reference, right)
            case ((Number() | Expression()), (Number() | Expression())):
                return self._same_value(reference, answer)
            case (Words() as letter, Expression()) if len(letter.text) == 1:
                return self._same_value(Expression(letter.text), answer)
            case (Expression(), Words() as letter) if len(letter.text) == 1:
                return self._same_value(reference, Expression(letter.text))
            case (Collection("{" | "", (only,)), _):
                return self.same(only, answer)
            case (_, Collection("{" | "", (only,))):
                return self.same(reference, only)
        return _squeezed(reference) == _squeezed(answer) != ""

    def same_parts(self, reference: Answer | str, answer: Answer | str) -> bool:
        """`same` where one side is still text."""
        lefts = readings(reference) if isinstance(reference, str) else (reference,)
        rights = readings(answer) if isinstance(answer, str) else (answer,)
        return any(self.same(left, right) for left in lefts for right in rights)

    def _same_value(self, reference: Number | Expression, answer: Number | Expression) -> bool:
        if reference.unit and answer.unit and reference.unit != answer.unit:
            return False
        if _squeezed(reference) == _squeezed(answer) != "":
            return True
        return self.algebra.same_value(_text(reference), _text(answer), self.tolerance)

    def _same_collection(self, reference: Collection, answer: Collection) -> bool:
        openings = {reference.opening, answer.opening}
        if "{" in openings:
            return openings <= {"{", ""} and self._same_unordered(
                tuple(dict.fromkeys(reference.items)), tuple(dict.fromkeys(answer.items))
            )
        if len(reference.items) != len(answer.items):
            return False
        if not reference.opening and not answer.opening and not _has_dots(reference):
            return self._same_unordered(reference.items, answer.items)
        pair = len(reference.items) == 2 and reference.opening and answer.opening
        if pair and (reference.opening, reference.closing) != (answer.opening, answer.closing):
            return False
        return self._same_ordered(reference.items, answer.items)

    def _same_matrix(self, reference: Matrix, answer: Matrix) -> bool:
        return len(reference.rows) == len(answer.rows) and all(
            self._same_ordered(left, right)
            for left, right in zip(reference.rows, answer.rows, strict=True)
        )

    def _same_ordered(self, reference: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        if len(reference) != len(answer):
            return False
        return all(self.same(left, right) for left, right in zip(reference, answer, strict=True))

    def _same_unordered(self, reference: Sequence[Answer], answer: Sequence[Answer]) -> bool:
        """Whether every item has its own partner; sameness is an equivalence, so greedy will do."""
        if len(reference) != len(answer):
            return False
        rest = list(answer)
        for item in reference:
            partner = item if item in rest else next((r for r in rest if self.same(item, r)), None)
            if partner is None:
                return False
            rest.remove(partner)
        return True


def _parts(union: Union | Collection) -> tuple[Answer, ...]:
    """The parts of a union; `x < 1 or x > 2` lists them."""
    return union.parts if isinstance(union, Union) else union.items


def _names_a_value(side: str) -> bool:
    """Whether `side = 5` says that the value is 5: a name, f(x), or a calculation."""
    return bool(_NAME.fullmatch(side)) or not _LETTER.search(_COMMAND.sub("", side))


def _has_dots(collection: Collection) -> bool:
    return any(isinstance(item, Expression) and "dots" in item.text for item in collection.items)


def _text(answer: Number | Expression) -> str:
    return answer.latex if isinstance(answer, Number) else answer.text


def _squeezed(answer: Answer) -> str:
    """The text of words or an expression without spaces; "" for what is compared by its parts."""
    if isinstance(answer, Words | Expression):
        return answer.text.replace(" ", "")
    return ""
