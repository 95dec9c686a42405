"""Algebra on two expressions, by sympy. In workers only: it may run for ever.

`expressions` reads the text. What it cannot read equals nothing but the same text, which was
compared before. Two values are first compared in numbers at fixed sample points, which decides
nearly all that differ; then exactly, so that 1/2004! is not 1/2006!. The comparison has as many
digits as the largest number written down, so that sqrt(2 + 10^-300) is not sqrt(2).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy

from services.reward.graders.answers import Relation
from services.reward.graders.expressions import UnreadableError, read_expression

_DIGITS = 40  # of the comparison in numbers, beyond those of the largest number
_SPARE_DIGITS = 15  # of these; rounding may take them
_BITS_PER_DIGIT = 3
_SAMPLES = tuple(
    sympy.Rational(numerator, 1009) for numerator in (738, 1399, 2256)
)  # for the symbols, in turn
_MIRRORED = {">": "<", "\\ge": "\\le"}
# What sympy raises on mathematics that it cannot handle; such a pair is not known to be equal.
SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    KeyError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


class SympyAlgebra:
    """See the module."""

    def load(self) -> None:
        """Let sympy import what it imports at its first use."""
        self.same_relation(Relation("=", "x", "y"), Relation("=", "y", "x"))
        self.same_value("\\sin(2x)", "2\\sin x\\cos x", Fraction(0))

    def same_value(self, reference: str, answer: str, tolerance: Fraction) -> bool:
        """Whether two expressions are equal, or differ by a number of at most the tolerance."""
        try:
            return _same_expression(_read(reference), _read(answer), tolerance)
        except (UnreadableError, *SYMPY_ERRORS):
            return False

    def same_relation(self, reference: Relation, answer: Relation) -> bool:
        """Whether one relation is the other multiplied by a constant (positive for < and <=)."""
        try:
            return _proportional(_difference(reference), _difference(answer))
        except (UnreadableError, *SYMPY_ERRORS):
            return False


@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    return read_expression(text)


def _difference(relation: Relation) -> tuple[str, Any]:
    """(operator, left - right), `greater` turned into `less`."""
    left, right = _read(relation.left), _read(relation.right)
    if relation.operator in _MIRRORED:
        return _MIRRORED[relation.operator], right - left
    return relation.operator, left - right


def _proportional(left: tuple[str, Any], right: tuple[str, Any]) -> bool:
    if left[0] != right[0] or left[1].free_symbols != right[1].free_symbols:
        return False
    ratio = sympy.simplify(sympy.together(left[1] / right[1]))
    if not ratio.is_number or ratio.is_finite is False or ratio.is_zero is not False:
        return False
    return bool(ratio.is_positive) or left[0] in ("=", "\\ne")


def _same_expression(left: Any, right: Any, tolerance: Fraction) -> bool:
    if left == right:
        return True
    if not tolerance and {left.is_rational, right.is_rational} == {True, False}:
        return False  # however many digits they share
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    digits = _DIGITS + max(_digits(left), _digits(right))
    points = [_point(symbols, shift) for shift in range(len(_SAMPLES))]
    if not all(_close_at(point, left, right, tolerance, digits) for point in points):
        return False
    difference = sympy.simplify(left - right)
    if difference.is_Rational:
        return bool(abs(difference) <= sympy.Rational(tolerance.numerator, tolerance.denominator))
    return True  # equal in numbers at every point, and simplify found nothing against it


def _digits(expression: Any) -> int:
    """How many digits the largest number in an expression has; 0 when none is beyond a few."""
    numbers = expression.atoms(sympy.Rational)
    bits = max((number.p.bit_length() + number.q.bit_length() for number in numbers), default=0)
    return bits // _BITS_PER_DIGIT if bits > _DIGITS else 0


def _point(symbols: list[Any], shift: int) -> dict[Any, Any]:
    """A value for each symbol."""
    return {
        symbol: _SAMPLES[(index + shift) % len(_SAMPLES)] + index
        for index, symbol in enumerate(symbols)
    }


def _close_at(
    point: dict[Any, Any], left: Any, right: Any, tolerance: Fraction, digits: int
) -> bool:
    """Whether both have nearly the same number at one point."""
    first, second = (side.evalf(digits, subs=point, maxn=2 * digits) for side in (left, right))
    if not (first.is_number and second.is_number):
        return False
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    scale = max(abs(first), abs(second))
    close = sympy.Float(10, digits) ** (_SPARE_DIGITS - digits)
    allowed = scale * close + sympy.Float(float(tolerance), digits)
    return bool(abs(first - second) <= allowed)
