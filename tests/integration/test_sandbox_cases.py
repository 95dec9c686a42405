# ruff: noqa: E501  programs read better on their lines
"""The code grader on the project's cases, and on the shapes that data sets have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollpacker.types import GraderKind
from services.reward.graders.code import CodeGrader
from services.reward.graders.grader import GradingTask
from services.reward.sandbox.command import MIB
from tests.sandbox_support import CPU_LIMIT_SECONDS, new_grader, score, verdict

CASES = Path(__file__).parent.parent / "data" / "sandbox_cases.jsonl"


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    made = new_grader()
    yield made
    made.end()


@pytest.fixture(scope="module")
def grader_of_little_output() -> Iterator[CodeGrader]:
    """Of 1 MiB: a slow processor takes longer than the time limit to print the 8 of the default."""
    made = new_grader(output_bytes=MIB)
    yield made
    made.end()


@pytest.mark.parametrize(
    "case",
    [json.loads(line) for line in CASES.read_text().splitlines()],
    ids=lambda case: case["id"],
)
def test_the_case_gets_its_verdict(
    grader_of_little_output: CodeGrader, case: dict[str, Any]
) -> None:
    grader = grader_of_little_output
    task = GradingTask(GraderKind.CODE, case["response"], json.dumps({"tests": case["tests"]}))
    graded = grader.grade_now(task) or grader.grade(task)
    assert graded.verdict.value in case["verdict"].split("|")
    assert graded.reward == (1.0 if graded.verdict.value == "CORRECT" else 0.0)
    assert graded.cpu_seconds < CPU_LIMIT_SECONDS + 1
    if graded.verdict.value == "TIMED_OUT":
        assert graded.cpu_seconds >= CPU_LIMIT_SECONDS


def test_every_case_must_pass_and_the_first_that_fails_decides(grader: CodeGrader) -> None:
    graded = score(grader, "print(6 // int(input()))", tests=[["2", "3"], ["0", "1"], ["3", "2"]])
    assert graded.verdict.value == "CRASHED"
    assert graded.reward == 0.0
    assert [run.verdict.value for run in graded.runs] == ["CORRECT", "CRASHED"]
    assert graded.breakdown == {"tests": 3.0, "tests_passed": 1.0}


def test_a_case_finds_nothing_of_the_case_before_it(grader: CodeGrader) -> None:
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')\nos.chmod('.', 0)"
    assert verdict(grader, program, tests=[["", "[]"], ["", "[]"]]) == "CORRECT"


def test_a_case_neither_reads_nor_pays_for_the_standard_error_of_the_case_before_it(
    grader: CodeGrader,
) -> None:
    program = (
        "import os, sys\nsys.stderr.write('x' * (3 << 20))\n"
        "try: os.pread(2, 1, 0)\nexcept OSError: print(1)"
    )
    assert verdict(grader, program, tests=[["", "1"]] * 8) == "CORRECT"


def test_input_that_is_not_read_does_not_disturb_the_next_case(grader: CodeGrader) -> None:
    tests = [["x" * 3_000_000, "1"], ["y" * 3_000_000, "1"], ["", "1"]]
    assert verdict(grader, "print(1)", tests=tests) == "CORRECT"


def test_large_input_and_output_flow_at_the_same_time(grader: CodeGrader) -> None:
    program = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
    text = "0123456789" * 10 + "\n"
    tests = [[text * 20_000, {"repeat": [text, 20_000]}]]
    assert verdict(grader, program, tests=tests) == "CORRECT"


def test_more_output_than_the_limit_is_allowed_where_it_is_expected(grader: CodeGrader) -> None:
    tests = [["", {"repeat": ["x", 10_000_000]}]]
    assert verdict(grader, "print('x' * 10_000_000)", tests=tests) == "CORRECT"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys\nsys.exit(1)", "CRASHED"),
        ("print(1)\nraise SystemExit", "CORRECT"),
        ("print(1)\nraise ValueError", "CRASHED"),
        ("import os\nprint(1, flush=True)\nos.abort()", "CRASHED"),
        ("import atexit\natexit.register(print, 1)", "CORRECT"),
        ("import threading as t\nt.Thread(target=print, args=[1]).start()", "CORRECT"),
        (
            "import threading as t\nend = t.Event()\n"
            "for _ in range(31): t.Thread(target=end.wait).start()\nend.set()\nprint(1)",
            "CORRECT",
        ),
        ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "CORRECT"),
        ("open('f', 'w').write('x' * (17 << 20))", "FILE_LIMIT"),
        ("for i in range(2000): open(str(i), 'w').close()", "FILE_LIMIT"),
        ("l = []\nwhile True: l.append(bytearray(1 << 20))", "MEMORY_LIMIT"),
        ("import time\nprint(1)\nimport sys; sys.stdout.flush()\nsys.stdin.read()", "CORRECT"),
        ("if __name__ == '__main__': print(1)", "CORRECT"),
        ("import os\nprint(1 + len(os.environ))", "CORRECT"),
        ("print(hash('a') == hash('a') and 1)", "CORRECT"),
        ("import numpy\nprint(numpy.ones(1, int)[0])", "CORRECT"),
        ("import grpc", "CRASHED"),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n-1)\nf(20000)\nprint(1)",
         "CORRECT"),
        ("\0", "COMPILE_ERROR"),
        ("(" * 10_000, "COMPILE_ERROR"),
    ],
)  # fmt: skip
def test_how_programs_end(grader: CodeGrader, program: str, expected: str) -> None:
    assert verdict(grader, program, tests=[["", "1\n"]]) == expected


def test_a_program_that_sleeps_ends_at_the_wall_limit() -> None:
    grader = new_grader(0.3, wall_factor=1.0, wall_slack_seconds=0.2)
    graded = score(grader, "import time\ntime.sleep(1000)", tests=[["", "1"]])
    grader.end()
    assert graded.verdict.value == "TIMED_OUT"
    assert graded.wall_seconds >= 0.5
    assert graded.cpu_seconds < 0.3


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def f(a, b): return a + b", "CORRECT"),
        ("def f(a, b): print('debug'); return a + b", "CORRECT"),
        ("class Solution:\n    def f(self, a: int, b: Optional[int]) -> int: return a + b", "CORRECT"),
        ("f = lambda *a: sum(a)", "CORRECT"),
        ("def f(a, b): return a - b", "INCORRECT"),
        ("def f(a, b): return str(a + b)", "INCORRECT"),
        ("def f(a, b): return object()", "INCORRECT"),
        ("def f(a, b): return a / 0", "CRASHED"),
        ("def g(a, b): return a + b", "CRASHED"),
        ("def f(a, b):\n    while True: pass", "TIMED_OUT"),
        ("def f(a, b: return", "COMPILE_ERROR"),
    ],
)  # fmt: skip
def test_a_function_is_called_and_its_value_compared(
    grader: CodeGrader, program: str, expected: str
) -> None:
    apps = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
    assert verdict(grader, program, **apps) == expected
    livecodebench = {"fn_name": "f", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
    if expected != "TIMED_OUT":
        assert verdict(grader, program, **livecodebench) == expected


def test_assert_lists_count_each_assert(grader: CodeGrader) -> None:
    asserts = ["assert f(1) == 2", "assert abs(f(0.5) - 1.5) < eps", "assert f(2) == 4"]
    graded = score(grader, "def f(x): return x + 1", asserts=asserts, setup="eps = 1e-6")
    assert [run.verdict.value for run in graded.runs] == ["CORRECT", "CORRECT", "INCORRECT"]


HUMANEVAL = {
    "test": "METADATA = {}\n\ndef check(candidate):\n"
    "    for i in range(5):\n        assert candidate([i, 1], key='k') == [1, i]\n",
    "entry_point": "turn",
}
STACK = """
import pytest
from solution import Stack

def test_stack():
    stack = Stack()
    stack.push((1, {2}))
    assert stack.size == 1 and len(stack) == 1
    assert stack.pop() == (1, {2})
    with pytest.raises(IndexError):
        stack.pop()

@pytest.mark.parametrize("value, twice", [(1, 2), ("a", "aa")])
def test_twice(value, twice):
    assert Stack().twice(value) == twice
"""
STACK_SOLUTION = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    size = property(__len__)
    def twice(self, value): return 2 * value
"""


def test_test_code_of_humaneval_and_kodcode_runs_apart_from_the_solution(
    grader: CodeGrader,
) -> None:
    assert verdict(grader, "def turn(a, key): return a[::-1]", **HUMANEVAL) == "CORRECT"
    assert verdict(grader, "def turn(a, key): return a", **HUMANEVAL) == "INCORRECT"
    assert verdict(grader, "def turn(a, key): return a.x", **HUMANEVAL) == "CRASHED"
    assert verdict(grader, STACK_SOLUTION, test=STACK) == "CORRECT"
    assert verdict(grader, STACK_SOLUTION.replace("2 *", "3 *"), test=STACK) == "INCORRECT"


def test_what_a_call_changes_in_its_arguments_is_seen(grader: CodeGrader) -> None:
    test = "from solution import f\ndef test_f():\n    a = [3, 1]\n    f(a)\n    assert a == [1, 3]"
    assert verdict(grader, "def f(a): a.sort()", test=test) == "CORRECT"
    assert verdict(grader, "def f(a): a = sorted(a)", test=test) == "INCORRECT"
