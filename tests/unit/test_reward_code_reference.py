"""References of code tasks, in the shapes that data sets use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.reward.graders.code_reference import (
    CallCase,
    CheckCase,
    ProgramCase,
    expected_text,
    parse_reference,
)
from services.reward.graders.grader import BadReferenceError


def cases(**reference: Any) -> tuple[Any, ...]:
    return parse_reference(json.dumps(reference)).cases


def test_pairs_objects_and_columns_of_stdin_tests_read_the_same() -> None:
    expected = (ProgramCase("1\n", "2\n"),)
    assert cases(tests=[["1\n", "2\n"]]) == expected
    assert cases(tests=[{"input": "1\n", "output": "2\n", "testtype": "stdin"}]) == expected
    assert cases(inputs=["1\n"], outputs=["2\n"]) == expected
    assert cases(inputs=[["1", "2"]], outputs=[["3", "4"]]) == (ProgramCase("1\n2", "3\n4"),)


def test_function_tests_are_read_as_apps_and_as_livecodebench_write_them() -> None:
    assert cases(fn_name="f", inputs=[[1, [2]]], outputs=[3]) == (CallCase("f", (1, [2]), 3),)
    assert cases(fn_name="f", inputs=["1\n[2]"], outputs=["3"]) == (CallCase("f", (1, [2]), 3),)


def test_values_wrapped_in_a_list_are_also_right_unwrapped_if_all_are() -> None:
    (case,) = cases(fn_name="f", inputs=[[1]], outputs=[[3]])
    assert (case.wrapped, case.unwrapped) == (True, 3)
    assert not any(case.wrapped for case in cases(fn_name="f", inputs=[[1], [2]], outputs=[[3], 4]))


def test_test_code_names_what_the_solution_must_define() -> None:
    (case,) = cases(asserts=["assert abs(f(math.pi) - g.x) < tol"], setup="import math\ntol = 1")
    assert isinstance(case, CheckCase)
    assert case.names == ("f", "g")
    source = "from solution import f\ndef test_f():\n    assert f(1) == 2"
    assert parse_reference(json.dumps({"test": source})).names == ("f",)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        ({"repeat": ["ab", 3]}, "ababab"),
        ({"repeat": ["1", 1], "then": {"repeat": ["0", 3]}, "end": "\n"}, "1000\n"),
        ({"repeat": ["a", 1], "then": {"repeat": ["b", 1], "end": "c"}, "end": "d"}, "abcd"),
        ({"end": "x"}, "x"),
    ],
)
def test_the_object_form_of_a_text(value: Any, text: str) -> None:
    assert expected_text(value) == text


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        ({}, "has no tests"),
        ({"tests": []}, "there is none"),
        ({"tests": "x"}, "tests: 'x' is not a list"),
        ({"tests": [["1"]]}, r"tests\[0\]"),
        ({"tests": [["1", 2]]}, "expected: 2 is not text"),
        ({"tests": [["1", "\ud800"]]}, "output: is no valid text"),
        ({"tests": [["1", {"repeat": ["x", -1]}]]}, "count >= 0"),
        ({"tests": [["1", {"repeat": ["x" * 100, 10**9]}]]}, "more than"),
        ({"tests": [["1", {"repaet": ["x", 1]}]]}, "repaet: unknown"),
        ({"inputs": ["1"], "outputs": []}, "outputs: 0 for 1 inputs"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, "inputs: '{' is not JSON"),
        ({"asserts": []}, "there is none"),
        ({"asserts": ["assert f("]}, "is no Python"),
        ({"asserts": ["f(1)"]}, "tests nothing"),
        ({"test": "def check(candidate):\n    assert candidate(1)"}, "entry_point: is missing"),
        ({"test": "class TestF:\n    def test_f(self):\n        assert 1"}, "tests nothing"),
        ({"answer": "42"}, "answer: unknown key"),
    ],
)
def test_an_unusable_reference_is_an_error_that_names_the_key(reference: Any, what: str) -> None:
    with pytest.raises(BadReferenceError, match=what):
        parse_reference(json.dumps(reference))


def test_expected_text_nested_without_end_is_refused() -> None:
    value: Any = "x"
    for _ in range(200):
        value = {"then": value}
    with pytest.raises(BadReferenceError, match="100 parts"):
        expected_text(value)
