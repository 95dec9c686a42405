"""When what a program gave is what was expected. Decided outside the sandbox, on plain data.

Text: the same lines, where blanks at the end of a line and newlines at the end of the text do not
count; everything else does. Where the expected word is a decimal number (it has a point or an
exponent), a number within 1e-6, absolutely or relatively, is the same. Integers are exact. An
expected output that is empty wants an empty output.

Values of function tests: equal as Python's built-in types are, tuples as lists (JSON has no
tuples), floats within 1e-6 as above, keys of dicts as JSON writes them.
"""

from __future__ import annotations

import math
import re
from typing import Any

_TOLERANCE = 1e-6
_NUMBER = re.compile(r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][-+]?\d{1,4})?")
_SEPARATORS = re.compile(r"([ \t\v\f\r]+)")
_LONGEST_NUMBER = 1000  # characters


def same_output(output: bytes, expected: str) -> bool:
    """Whether a program's standard output is the expected text."""
    text = output.decode("utf-8", "surrogateescape")
    if text == expected:
        return True
    if expected == "":
        return False
    got_lines, expected_lines = _lines(text), _lines(expected)
    return len(got_lines) == len(expected_lines) and all(
        got == wanted or _same_words(got, wanted)
        for got, wanted in zip(got_lines, expected_lines, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(got: str, wanted: str) -> bool:
    got_words, wanted_words = _SEPARATORS.split(got), _SEPARATORS.split(wanted)
    return len(got_words) == len(wanted_words) and all(
        word == other or _close_numbers(word, other)
        for word, other in zip(got_words, wanted_words, strict=True)
    )


def _close_numbers(got: str, wanted: str) -> bool:
    if max(len(got), len(wanted)) > _LONGEST_NUMBER or not _is_decimal(wanted):
        return False
    return bool(_NUMBER.fullmatch(got)) and _close(float(got), float(wanted))


def _is_decimal(word: str) -> bool:
    return bool(_NUMBER.fullmatch(word)) and any(mark in word for mark in ".eE")


def _close(got: float, wanted: float) -> bool:
    if not (math.isfinite(got) and math.isfinite(wanted)):
        return got == wanted
    return math.isclose(got, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(got: Any, expected: Any) -> bool:
    """Whether a function's value is the expected JSON value. Raises RecursionError."""
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(expected)
            and all(map(same_value, got, expected))
        )
    if isinstance(expected, dict):
        return isinstance(got, dict) and _same_items(got, expected)
    if isinstance(expected, float) or isinstance(got, float):
        return _is_number(got) and _is_number(expected) and _close_values(got, expected)
    return bool(got == expected)


def _same_items(got: dict[Any, Any], expected: dict[str, Any]) -> bool:
    named = {key if isinstance(key, str) else str(key): value for key, value in got.items()}
    return named.keys() == expected.keys() and all(
        same_value(named[key], value) for key, value in expected.items()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close_values(got: float, expected: float) -> bool:
    try:
        return _close(float(got), float(expected))
    except OverflowError:  # an integer that no float can hold
        return got == expected
