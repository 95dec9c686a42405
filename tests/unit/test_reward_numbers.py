"""Numbers are read exactly, whatever their spelling."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders.answers import readings
from services.reward.graders.numbers import Number, parse_number, same_number

EXACT = Fraction(0)


@given(st.integers())
def test_an_integer_is_itself(value: int) -> None:
    text = str(value)
    assert parse_number(text) == (Number(Fraction(value)) if len(text) <= 200 else None)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_a_fraction_has_one_value_in_all_its_spellings(top: int, bottom: int) -> None:
    value = Fraction(top, bottom)
    sign = "-" if top < 0 else ""
    for text in (
        f"{top}/{bottom}",
        f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}",
        f"\\frac{{{top}}}{{{bottom}}}",
    ):
        assert readings(text) == (Number(value),)


@given(st.integers(0, 10**12), st.integers(0, 6))
def test_a_decimal_is_the_fraction_that_its_digits_say(digits: int, places: int) -> None:
    text = f"{digits / 1:.0f}".zfill(places + 1)
    text = f"{text[: len(text) - places]}.{text[len(text) - places :]}" if places else text
    assert parse_number(text) == Number(Fraction(digits, 10**places))


@given(st.integers(0, 10**15))
def test_separators_and_leading_zeros_change_nothing(value: int) -> None:
    assert readings(f"{value:,}")[0] == Number(Fraction(value))
    assert readings(f"00{value}") == (Number(Fraction(value)),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("11 5/6", Fraction(71, 6)),
        ("-2\\frac{1}{3}", Fraction(-7, 3)),
        ("\\frac12", Fraction(1, 2)),
        ("\\frac1{20}", Fraction(1, 20)),
        ("1.5e3", Fraction(1500)),
        ("3 \\times 10^{-2}", Fraction(3, 100)),
        ("2^{10}", Fraction(1024)),
        ("+5", Fraction(5)),
        (".5", Fraction(1, 2)),
        ("18.", Fraction(18)),
    ],
)
def test_common_notations_are_read(text: str, value: Fraction) -> None:
    assert parse_number(text) == Number(value)


@pytest.mark.parametrize(
    "text",
    ["", "x", "1/0", "\\frac{1}{0}", "1,00", "1 2", "5 x", "5 pi", "1e9999", "9^{9999}", "1" * 201],
)
def test_anything_else_is_no_number(text: str) -> None:
    assert parse_number(text) is None


def test_a_unit_counts_only_when_both_have_one() -> None:
    five, centimetres, metres = Number(Fraction(5)), *map(parse_number, ("5 cm", "5 metres"))
    assert centimetres
    assert metres
    assert same_number(five, centimetres, EXACT)
    assert same_number(centimetres, five, EXACT)
    assert not same_number(centimetres, metres, EXACT)
