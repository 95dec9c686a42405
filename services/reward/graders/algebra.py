"""Algebra on two expressions: math-verify's LaTeX grammar in front, sympy behind. Workers only.

Nothing here evaluates text: math-verify is asked for LaTeX alone (its plain-text mode would call
sympy's parse_expr). A guard refuses what the parser would misread (`1011_2`) and what could only
be a trap (too long, too deep, numeric power towers). What is refused or unreadable equals nothing
but the same text, which was compared before. What passes the guard may still run for ever: the
worker's time limit ends it.

Two values are first compared in numbers at fixed sample points, which decides nearly all that
differ; then exactly, so that 1/2004! is not 1/2006!. A decimal is the fraction that it says.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from services.reward.graders.answers import Relation
from services.reward.graders.normal_form import closing_index

_MAX_CHARACTERS = 400
_MAX_NESTING = 12
_MAX_DIGITS = 60
_MAX_EXPONENT = 2000
_MAX_FACTORIAL = 5000
_NUMBER = re.compile(r"\d+")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_MARKED_NUMBER = re.compile(r"\d\s*[_']")
_ALLOWED = re.compile(r"[A-Za-z0-9\s\\{}()\[\]+\-*/^_.,!|<>=&:']*")
_LATEX_ONLY = (LatexExtractionConfig(),)
_DIGITS = 40  # of the comparison in numbers
_CLOSE = sympy.Float("1e-25", _DIGITS)  # relative difference that rounding can explain
_SAMPLES = ("0.7310585786300049", "1.3862943611198906", "2.2360679774997897")
_MIRRORED = {">": "<", "\\ge": "\\le"}

# What sympy raises on mathematics that it cannot handle; such a pair is not known to be equal.
_SYMPY_ERRORS = (
    ArithmeticError,
    AttributeError,
    KeyError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that the time limit is ours


class BeyondGuardError(Exception):
    """The expression is too large to be looked at, or would be misread."""


class MathVerifyAlgebra:
    """See the module. Every method may run for ever."""

    def same_value(self, reference: str, answer: str, tolerance: Fraction) -> bool:
        """Whether two expressions are equal, or differ by a number of at most the tolerance."""
        left, right = _read(reference), _read(answer)
        if left is None or right is None:
            return False
        if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
            return bool(verify(left, right, timeout_seconds=None))
        try:
            return _same_expression(left, right, tolerance)
        except _SYMPY_ERRORS:
            return False

    def same_relation(self, reference: Relation, answer: Relation) -> bool:
        """Whether one relation is the other multiplied by a constant (positive for < and <=)."""
        try:
            left, right = _difference(reference), _difference(answer)
            return left is not None and right is not None and _proportional(left, right)
        except _SYMPY_ERRORS:
            return False


def _proportional(left: tuple[str, Any], right: tuple[str, Any]) -> bool:
    if left[0] != right[0] or left[1].free_symbols != right[1].free_symbols:
        return False
    ratio = sympy.simplify(sympy.together(left[1] / right[1]))
    if not ratio.is_number or ratio.is_finite is False or ratio.is_zero is not False:
        return False
    return bool(ratio.is_positive) or left[0] in ("=", "\\ne")


def _difference(relation: Relation) -> tuple[str, Any] | None:
    """(operator, left - right), `greater` turned into `less`."""
    left, right = _read(relation.left), _read(relation.right)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return None
    if relation.operator in _MIRRORED:
        return _MIRRORED[relation.operator], right - left
    return relation.operator, left - right


@lru_cache(maxsize=256)
def _read(latex: str) -> Any:
    """The sympy object of some LaTeX; None when it is refused or no mathematics."""
    try:
        check_guard(latex)
    except BeyondGuardError:
        return None
    found = parse(f"${latex}$", _LATEX_ONLY, fallback_mode="no_fallback", parsing_timeout=None)
    return _exact(found[0]) if found else None


def _exact(value: Any) -> Any:
    """The value with each decimal as the fraction that its digits say."""
    if not isinstance(value, sympy.Expr):
        return value
    decimals = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    return value.xreplace(decimals)


def _same_expression(left: Any, right: Any, tolerance: Fraction) -> bool:
    if left == right:
        return True
    if not tolerance and {left.is_rational, right.is_rational} == {True, False}:
        return False  # however many digits they share
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if not all(_close_at(left, right, symbols, shift, tolerance) for shift in range(len(_SAMPLES))):
        return False
    difference = sympy.simplify(left.doit() - right.doit())
    if difference.is_Rational:
        return bool(abs(difference) <= sympy.Rational(tolerance.numerator, tolerance.denominator))
    return True  # equal to 25 digits at every point, and simplify found nothing against it


def _close_at(left: Any, right: Any, symbols: list[Any], shift: int, tolerance: Fraction) -> bool:
    """Whether both have nearly the same number at one sample point."""
    point = {
        symbol: sympy.Float(_SAMPLES[(index + shift) % len(_SAMPLES)], _DIGITS) + index
        for index, symbol in enumerate(symbols)
    }
    first, second = (side.evalf(_DIGITS, subs=point) for side in (left, right))
    if not (first.is_number and second.is_number):
        return False
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    scale = max(abs(first), abs(second))
    allowed = scale * _CLOSE + sympy.Float(float(tolerance), _DIGITS)
    return bool(abs(first - second) <= allowed)


def check_guard(latex: str) -> None:
    """Raise BeyondGuardError for text that is too large or deep to be mathematics in earnest."""
    if len(latex) > _MAX_CHARACTERS or not _ALLOWED.fullmatch(latex):
        raise BeyondGuardError("too long, or holds characters that mathematics has not")
    if _MARKED_NUMBER.search(latex):
        raise BeyondGuardError("a number in another base or with a prime, which the parser drops")
    if any(len(number) > _MAX_DIGITS for number in _NUMBER.findall(latex)):
        raise BeyondGuardError("a number is too long")
    if any(int(number) > _MAX_FACTORIAL for number in _FACTORIAL.findall(latex)):
        raise BeyondGuardError("a factorial is too large")
    _check_nesting(latex)
    _check_exponents(latex)


def _check_nesting(latex: str) -> None:
    depth = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        if depth > _MAX_NESTING:
            raise BeyondGuardError("nested too deeply")


def _check_exponents(latex: str) -> None:
    """No large number and no number to a power may stand in an exponent."""
    for position in (index for index, character in enumerate(latex) if character == "^"):
        exponent = _exponent_at(latex, position + 1)
        if any(int(number) > _MAX_EXPONENT for number in _NUMBER.findall(exponent)):
            raise BeyondGuardError("an exponent is too large")
        if "^" in exponent and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", exponent):
            raise BeyondGuardError("a tower of numeric powers")


def _exponent_at(latex: str, start: int) -> str:
    rest = latex[start:].lstrip()
    if not rest.startswith("{"):
        return rest[:1]
    end = closing_index(rest, 0)
    return rest[1:end] if end > 0 else rest
