"""Grading a file gives the lines of the file, in order, by the code of the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.reward.offline import GradeFileError, grade_code_file, grade_math_file

CASES = Path(__file__).parent.parent / "data" / "math_cases.jsonl"


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_the_case_file_comes_back_in_order_with_its_rewards() -> None:
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    graded = list(grade_math_file(CASES, slots=1))
    assert [line.id for line in graded] == [case["id"] for case in cases]
    assert [line.reward for line in graded] == [case["reward"] for case in cases]
    assert graded[0].as_math_json() == {"id": "m01", "reward": 1.0, "verdict": "CORRECT"}


def test_what_the_input_says_about_reward_and_verdict_is_ignored(tmp_path: Path) -> None:
    row = {"id": "a", "ground_truth": "4", "response": "\\boxed{5}"}
    lying = {**row, "reward": 1, "verdict": "CORRECT", "why": "because"}
    path = write(tmp_path / "lie.jsonl", row, lying)
    assert [line.reward for line in grade_math_file(path, slots=1)] == [0.0, 0.0]


def test_a_lone_surrogate_in_a_response_is_graded_as_any_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", '{"id": "a", "ground_truth": "x+1", "response": "\\ud800 z"}'
    )
    assert [line.reward for line in grade_math_file(path, slots=1)] == [0.0]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ({"ground_truth": "4", "response": "4"}, "id: None is not text"),
        ({"id": 7, "ground_truth": "4", "response": "4"}, "id: 7 is not text"),
        ({"id": "b", "ground_truth": 4, "response": "4"}, "ground_truth: 4 is not text"),
        ({"id": "b", "ground_truth": "", "response": "4"}, "ground_truth: answer: '' is no answer"),
        ({"id": "b", "ground_truth": "4"}, "response: None is not text"),
        ({"id": "b", "ground_truth": "4", "response": "4", "answer": "4"}, "answer: unknown field"),
    ],
)
def test_a_bad_line_is_an_error_that_names_line_and_field(
    tmp_path: Path, line: Any, what: str
) -> None:
    good = {"id": "a", "ground_truth": "4", "response": "4"}
    path = write(tmp_path / "bad.jsonl", good, line)
    with pytest.raises(GradeFileError) as caught:
        next(grade_math_file(path))
    assert f"line 2: {what}" in str(caught.value)


def test_programs_are_run_and_come_back_in_order_with_verdict_and_cpu_time(tmp_path: Path) -> None:
    program, tests = "```python\nprint(2 * int(input()))\n```", [["1\n", "2\n"]]
    long = [["7" * 5000, {"repeat": ["1", 1], "then": {"repeat": ["5", 4999]}, "end": "4"}]]
    path = write(
        tmp_path / "code.jsonl",
        {"id": "a", "response": program, "tests": tests, "verdict": "CRASHED", "why": "a lie"},
        {"id": "b", "response": "none", "tests": tests},
        {"id": "c", "response": program, "tests": long},
        {"id": "d", "response": "```python\ndef f(x): return x\n```", "asserts": ["assert f(1)"]},
    )
    graded = list(grade_code_file(path, slots=1, time_limit_seconds=5))
    assert [line.id for line in graded] == ["a", "b", "c", "d"]
    assert [line.verdict for line in graded] == ["CORRECT", "NO_CODE", "CORRECT", "CORRECT"]
    written = graded[0].as_code_json()
    assert written.pop("cpu_seconds") > 0
    assert written == {"id": "a", "verdict": "CORRECT", "reward": 1.0}
    assert graded[1].as_code_json()["cpu_seconds"] == 0.0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"id": "b", "response": "x"}, "has no tests"),
        ({"id": "b", "response": "x", "tests": [["1"]]}, "tests[0]"),
        ({"id": "b", "response": "x", "tests": [["1", "1"]], "answer": "4"}, "answer: unknown"),
        ({"id": "b", "tests": [["1", "1"]]}, "response: None is not text"),
    ],
)
def test_a_bad_line_of_code_is_an_error_that_names_line_and_field(
    tmp_path: Path, line: Any, what: str
) -> None:
    with pytest.raises(GradeFileError) as caught:
        next(grade_code_file(write(tmp_path / "bad.jsonl", line)))
    assert f"line 1: {what}" in str(caught.value)
