"""A grammar for the mathematics of final answers: normalised text in, a sympy expression out.

    sum      = ["+" | "-"] product { ("+" | "-") product }
    product  = factor { ("*" | "/" | "\\cdot" | "\\times" | "\\div") factor | factor }
    factor   = ["+" | "-"] atom { "!" | "^" exponent }
    atom     = number | symbol | constant | "(" sum ")" | "|" sum "|" | command

It reads LaTeX and plain notation alike (`\\frac12`, `1/2`, `\\sqrt{2}`, `sqrt(2)`). Text is never
evaluated and never shown to sympy: expressions are built from its classes, numbers exactly. What
the grammar does not know is unreadable; nothing is skipped or guessed.

Powers, factorials and binomials of numbers are bounded before they are computed, and so is the
depth, so that reading takes milliseconds whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

MAX_CHARACTERS = 400
_MAX_DEPTH = 40
_MAX_BITS = 100_000  # of an exact number
_MAX_FACTORIAL = 5_000

_TOKEN = re.compile(
    r"(?P<number>\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|(?P<command>\\[A-Za-z]+|\\[{}|])"
    r"|(?P<word>[A-Za-z]+)|(?P<mark>\*\*|[-+*/^!_(){}\[\]|%])|(?P<space>\s+)"
)
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec,
    "csc": sympy.csc, "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
    "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "exp": sympy.exp, "ln": sympy.log,
    "log": sympy.log, "abs": sympy.Abs,
}  # fmt: skip
_INVERSES = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}
_INFINITIES = frozenset({"inf", "infinity", "oo"})
_PLAIN_WORDS = frozenset(_FUNCTIONS) | {"pi", "sqrt"}
_PRODUCT_MARKS = {"*": False, "\\cdot": False, "\\times": False, "/": True, "\\div": True}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu"  # noqa: SIM905
    " xi rho sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi"
    " Omega".split()
)
_CLOSINGS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ROUNDINGS = {"|": sympy.Abs, "\\lfloor": sympy.floor, "\\lceil": sympy.ceiling}


class UnreadableError(ValueError):
    """The text is no expression of the grammar, or computes a number that is too large."""


def read_expression(text: str) -> Any:
    """The sympy expression that a whole text is. Raises UnreadableError."""
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"longer than {MAX_CHARACTERS} characters")
    reader = _Reader(_tokens(text))
    expression = reader.sum()
    if reader.head:
        raise UnreadableError(f"{reader.head} is left over")
    if expression.has(sympy.nan, sympy.zoo):
        raise UnreadableError("is not defined")
    return expression


def _tokens(text: str) -> list[str]:
    """Numbers, commands with their backslash, single letters and known words, and marks."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"{text[position]!r} is no mathematics")
        position = match.end()
        word = match["word"]
        if word and word.lower() in _INFINITIES:
            tokens.append("\\infty")
        elif word:
            tokens += [f"\\{word}"] if word in _PLAIN_WORDS else list(word)
        elif not match["space"]:
            tokens.append("^" if match[0] == "**" else match[0])
    return tokens


class _Reader:
    """Recursive descent; `head` is the next token, "" at the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self._depth = 0

    @property
    def head(self) -> str:
        return self._tokens[-1] if self._tokens else ""

    def sum(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        total = self._product()
        while self.head in ("+", "-"):
            sign = -1 if self._take() == "-" else 1
            total = total + sign * self._product()
        self._depth -= 1
        return total

    def _product(self) -> Any:
        product = self._factor()
        while True:
            if self.head in _PRODUCT_MARKS:
                divides = _PRODUCT_MARKS[self._take()]
                factor = self._factor()
                product = product / factor if divides else product * factor
            elif self._starts_atom():
                product = product * self._postfix(self._atom())
            else:
                return product

    def _factor(self) -> Any:
        sign = 1
        while self.head in ("+", "-"):
            sign *= -1 if self._take() == "-" else 1
        return sign * self._postfix(self._atom())

    def _postfix(self, base: Any) -> Any:
        while self.head in ("!", "^", "%"):
            mark = self._take()
            if mark == "!":
                base = _factorial(base)
            elif mark == "%":
                base = base / 100
            else:
                base = _power(base, self._exponent())
        return base

    def _exponent(self) -> Any:
        if self.head in ("+", "-"):
            return self._factor()
        return self._postfix(self._atom()) if self.head != "{" else self._atom()

    def _starts_atom(self) -> bool:
        """Whether a factor follows without a sign: `2x`, not `2 3` and not `|`, which may close."""
        head = self.head
        return bool(head) and (head.isalpha() or head in ("(", "[", "{") or self._is_command(head))

    @staticmethod
    def _is_command(head: str) -> bool:
        return head[0] == "\\" and head not in _PRODUCT_MARKS and head not in _CLOSINGS.values()

    def _atom(self) -> Any:
        taken = self._take()
        if taken in _CLOSINGS:
            inner = self.sum()
            self._expect(_CLOSINGS[taken])
            return _ROUNDINGS[taken](inner) if taken in _ROUNDINGS else inner
        if taken[:1].isdigit() or taken[:1] == ".":
            return self._number(taken)
        if taken.startswith("\\"):
            return self._command(taken[1:])
        if taken.isalpha():
            return _CONSTANTS[taken] if taken in _CONSTANTS else self._symbol(taken)
        raise UnreadableError(f"{taken or 'the end'} stands where a value should")

    def _number(self, digits: str) -> Any:
        if self.head == "_":
            raise UnreadableError("a number in another base")
        value = Fraction(digits.replace(",", ""))
        return sympy.Rational(value.numerator, value.denominator)

    def _symbol(self, name: str) -> Any:
        if self.head == "_":
            self._take()
            name = f"{name}_{self._raw_group()}"
        return sympy.Symbol(name, real=True)

    def _raw_group(self) -> str:
        """A subscript as text."""
        if self.head != "{":
            return self._take()
        self._take()
        parts = []
        while self.head and self.head not in ("{", "}"):
            parts.append(self._take())
        self._expect("}")
        return "".join(parts)

    def _command(self, name: str) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _GREEK:
            return self._symbol(name)
        if name == "frac":
            return _quotient(self._argument(), self._argument())
        if name == "sqrt":
            return self._root()
        if name == "binom":
            return _binomial(self._argument(), self._argument())
        raise UnreadableError(f"\\{name} is unknown")

    def _root(self) -> Any:
        degree: Any = sympy.Integer(2)
        if self.head == "[":
            self._take()
            degree = self.sum()
            self._expect("]")
        return _power(self._atom(), 1 / degree)

    def _function(self, name: str) -> Any:
        """A function with its argument: `\\sin^2 x`, `\\log_2 8`, `\\sin 2x`, `exp(16)`."""
        base: Any = None
        power: Any = None
        while self.head in ("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                power = self._exponent()
        argument = self._function_argument()
        if base is not None:
            if name != "log":
                raise UnreadableError(f"\\{name} has no base")
            value = sympy.log(argument) / sympy.log(base)
        elif power == -1 and name in _INVERSES:
            return _INVERSES[name](argument)
        else:
            value = _FUNCTIONS[name](argument)
        return value if power is None else _power(value, power)

    def _function_argument(self) -> Any:
        """A group, or the factors up to the next sign or function."""
        if self.head in ("(", "[", "{", "|"):
            return self._atom()
        argument = self._postfix(self._atom())
        while self._starts_atom() and self.head[1:] not in _FUNCTIONS and self.head != "(":
            argument = argument * self._postfix(self._atom())
        return argument

    def _argument(self) -> Any:
        """The argument of a command: a group, one digit, one letter or one command."""
        head = self.head
        if head[:1].isdigit() and len(head) > 1:
            self._tokens[-1] = head[1:]
            return sympy.Integer(int(head[0]))
        return self._atom()

    def _take(self) -> str:
        return self._tokens.pop() if self._tokens else ""

    def _expect(self, wanted: str) -> None:
        if self._take() != wanted:
            raise UnreadableError(f"{wanted} is missing")


def _quotient(top: Any, bottom: Any) -> Any:
    return top / bottom


def _power(base: Any, exponent: Any) -> Any:
    """base ** exponent, unless that computes a number that is too large."""
    if base.is_number and exponent.is_number:
        if _bits(exponent) > 64:
            raise UnreadableError("an exponent is too large")
        if base.is_Rational and _bits(base) * abs(float(exponent.evalf(15, chop=True))) > _MAX_BITS:
            raise UnreadableError("a power is too large")
    return sympy.Pow(base, exponent)


def _bits(number: Any) -> int:
    return int(number.p.bit_length() + number.q.bit_length()) if number.is_Rational else 1


def _factorial(value: Any) -> Any:
    if value.is_number and not (value.is_Integer and 0 <= value <= _MAX_FACTORIAL):
        raise UnreadableError("a factorial is too large, or of no natural number")
    return sympy.factorial(value)


def _binomial(top: Any, bottom: Any) -> Any:
    if any(value.is_number and abs(value) > _MAX_FACTORIAL for value in (top, bottom)):
        raise UnreadableError("a binomial is too large")
    return sympy.binomial(top, bottom)
