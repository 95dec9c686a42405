"""Exact rational numbers as people write them; pure text rules, bounded in size.

Read are integers, decimals (repeating ones too: `0.\\overline{3}`), thousands separators (a comma
or a space), percentages, fractions (`71/6`, `\\frac{1}{2}`, `\\frac12`), mixed numbers (`11 5/6`),
scientific notation and small powers (`2^{10}`), each with an optional currency or unit. A decimal
is exactly the fraction that its digits say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARACTERS = 200
_MAX_EXPONENT = 400  # of powers and of ten; keeps every number below some 10,000 digits

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_SIGN = r"(?P<sign>[-+]?)\s*"
_FRACTION = (
    r"(?:\\frac\s*(?:\{\s*(?P<top>-?\d+(?:\.\d+)?)\s*\}|(?P<top_digit>\d))"
    r"\s*(?:\{\s*(?P<bottom>\d+(?:\.\d+)?)\s*\}|(?P<bottom_digit>\d))"
    rf"|(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL}))"
)
_PLAIN = re.compile(rf"{_SIGN}(?P<decimal>{_DECIMAL}|\d{{1,3}}(?: \d{{3}})+(?:\.\d*)?)")
_RATIO = re.compile(rf"{_SIGN}{_FRACTION}")
_MIXED = re.compile(rf"{_SIGN}(?P<whole>\d+)(?:\s+|(?=\\frac)){_FRACTION}")
_SCIENTIFIC = re.compile(
    rf"{_SIGN}(?P<decimal>{_DECIMAL})"
    r"\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*\^)\s*\{?\s*(?P<exponent>[-+]?\d{1,4})\s*\}?"
)
_REPEATING = re.compile(
    rf"{_SIGN}(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar)\s*\{{(?P<again>\d+)\}}"
)
_POWER = re.compile(rf"{_SIGN}(?P<base>\d{{1,12}})\s*\^\s*\{{?\s*(?P<exponent>\d{{1,4}})\s*\}}?")
_UNIT = re.compile(r"(?P<number>.*[\d.}])\s*(?P<unit>%|[A-Za-z]+(?: [A-Za-z]+)?(?:\^\{?[23]\}?)?)")
_NAMES = {
    "%": "%", "percent": "%", "per cent": "%", "degree": "degrees", "deg": "degrees",
    "metre": "m", "meter": "m", "centimetre": "cm", "centimeter": "cm", "millimeter": "mm",
    "kilometer": "km", "kilometre": "km", "gram": "g", "kilogram": "kg", "second": "s",
    "sec": "s", "minute": "min", "hour": "h", "hr": "h", "inch": "in", "inche": "in",
    "foot": "feet", "ft": "feet", "litre": "l", "liter": "l", "usd": "dollar",
}  # fmt: skip
_UNITS = frozenset(_NAMES.values()) | frozenset(
    "degrees mm cm dm m km mg g kg s min h day week month year in feet mile yard ml l dollar cent"  # noqa: SIM905
    " euro pound unit mph rad radian hz j kj w kw n v".split()
)


_AREA_OR_VOLUME = re.compile(r"(?P<kind>sq|square|cubic) (?P<unit>[a-z]+)")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact rational number."""

    value: Fraction
    unit: str = ""  # one name per unit; "%" leaves the value as written: 28 % is 28

    @property
    def latex(self) -> str:
        value = self.value / 100 if self.unit == "%" else self.value
        if value.denominator == 1:
            return str(value.numerator)
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def parse_number(text: str) -> Number | None:
    """The number that a normalised text is as a whole, or None."""
    if len(text) > MAX_NUMBER_CHARACTERS or not any(character.isdigit() for character in text):
        return None
    value = _value(text)
    if value is not None:
        return Number(value)
    match = _UNIT.fullmatch(text)
    unit = unit_name(match["unit"]) if match else None
    value = _value(match["number"]) if match and unit else None
    return Number(value, unit) if value is not None and unit else None


def is_grouped(text: str) -> bool:
    """Whether a number has separators that could also separate the items of a list."""
    return "," in text and ",0" not in text


def same_number(reference: Number, answer: Number, tolerance: Fraction) -> bool:
    """Equal within an absolute tolerance.

    A unit counts only when both have one. A percentage equals the same number without its sign
    (28 for 28 %) and the share that it stands for (0.28).
    """
    if reference.unit and answer.unit and reference.unit != answer.unit:
        return False
    scales = {Fraction(1)}
    if reference.unit != answer.unit and "%" in (reference.unit, answer.unit):
        scales.add(Fraction(100) if reference.unit == "%" else Fraction(1, 100))
    return any(abs(reference.value - answer.value * scale) <= tolerance for scale in scales)


def _value(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        return _signed(match, _decimal(match["decimal"]))
    if match := _RATIO.fullmatch(text):
        return _optional(match, _ratio(match))
    if match := _MIXED.fullmatch(text):
        part = _ratio(match)
        return _optional(match, None if part is None else int(match["whole"]) + part)
    if match := _REPEATING.fullmatch(text):
        return _signed(match, _repeating(match["whole"], match["once"], match["again"]))
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match["exponent"])
        if abs(exponent) > _MAX_EXPONENT:
            return None
        return _signed(match, _decimal(match["decimal"]) * Fraction(10) ** exponent)
    if match := _POWER.fullmatch(text):
        exponent = int(match["exponent"])
        if exponent > _MAX_EXPONENT:
            return None
        return _signed(match, Fraction(int(match["base"]) ** exponent))
    return None


def _signed(match: re.Match[str], value: Fraction) -> Fraction:
    return -value if match["sign"] == "-" else value


def _optional(match: re.Match[str], value: Fraction | None) -> Fraction | None:
    return None if value is None else _signed(match, value)


def _ratio(match: re.Match[str]) -> Fraction | None:
    """Numerator over denominator; None when that is 0."""
    top = match["top"] or match["top_digit"] or match["over"]
    bottom = match["bottom"] or match["bottom_digit"] or match["under"]
    below = _decimal(bottom)
    return _decimal(top) / below if below else None


def _repeating(whole: str, once: str, again: str) -> Fraction:
    """whole.once(again)(again)..."""
    before, all_digits = int(f"0{whole}{once}"), int(f"{whole}{once}{again}")
    return Fraction(all_digits - before, 10 ** len(once) * (10 ** len(again) - 1))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").removesuffix("."))


def unit_name(text: str) -> str | None:
    """The one name of a known unit, singular; None for any other word."""
    text = _AREA_OR_VOLUME.sub(_as_power, text.lower())
    base, _, power = text.partition("^")
    for word in (base, base.removesuffix("s")):
        name = _NAMES.get(word, word)
        if name in _UNITS:
            return f"{name}^{power.strip('{}')}" if power else name
    return None


def _as_power(match: re.Match[str]) -> str:
    """`square cm` is cm^2."""
    singular = match["unit"].removesuffix("s") if match["unit"] != "s" else "s"
    return f"{singular}^{3 if match['kind'] == 'cubic' else 2}"
