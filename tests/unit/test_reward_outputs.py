"""When what a program gave is what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from services.reward.graders.outputs import same_output, same_value


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"1\n2 \n", "1\n2"),
        (b"1 \t\r\n\n\n", "1"),
        (b"", ""),
        (b"0.333333\n", "0.3333331\n"),
        (b"1000000.5", "1000000.6"),
        (b"3", "3.0"),
        (b"1e-9", "0.0"),
        ("é\n".encode(), "é"),
    ],
)
def test_the_same(output: bytes, expected: str) -> None:
    assert same_output(output, expected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"anything", ""),
        (b"\n", ""),
        (b"1 1 2", "1\n1\n2"),
        (b"1\n\n2", "1\n2"),
        (b" 1", "1"),
        (b"1  2", "1 2"),
        (b"3.0", "3"),
        (b"1000001", "1000000"),
        (b"0.34", "0.33"),
        (b"nan", "0.0"),
        (b"inf", "1e999"),
        (b"\xff\x00", "1"),
        (b"\xff", "\ufffd"),
        (b"0." + b"3" * 2000, "0." + "3" * 2001),
    ],
)
def test_not_the_same(output: bytes, expected: str) -> None:
    assert not same_output(output, expected)


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ([1], [1, 2], False),
        (1, 1, True),
        (1.0000001, 1.0, True),
        (1, 1.0, True),
        (10**20, 10**20 + 1, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        (None, [], False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", 2: "b"}, {"1": "a"}, False),
        ({1, 2}, [1, 2], False),
        (float("nan"), 1.0, False),
        (object(), None, False),
    ],
)
def test_values_compare_as_plain_data(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same
