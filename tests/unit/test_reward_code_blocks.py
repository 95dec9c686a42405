"""Which part of a response is its program."""

from __future__ import annotations

import pytest

from rollpacker.types import Verdict
from services.reward.graders.code_blocks import fenced_blocks, find_program


def block(code: str, language: str = "python", fence: str = "```") -> str:
    return f"{fence}{language}\n{code}\n{fence}\n"


READS, USAGE = "n = int(input())\nprint(n)", "print('try it')"


@pytest.mark.parametrize(
    ("response", "names", "program"),
    [
        (block(READS), (), READS),
        (block(READS) + block(USAGE), (), READS),
        (block(USAGE) + block(READS), (), READS),
        (block("print(1)") + block("print(2)"), (), "print(2)"),
        (block("x = 1", "") + block(READS), (), READS),
        (block(READS, ""), (), READS),
        (block(READS, "Python3"), (), READS),
        (block(READS, "{.python}"), (), READS),
        (block(READS, fence="~~~~"), (), READS),
        ("```python\n" + READS, (), READS),  # never closed
        ("<think>" + block(USAGE) + "</think>" + block(READS), (), READS),
        (block("def f(): pass") + block("f()"), ("f",), "def f(): pass"),
        (block("class Solution: pass") + block("Solution()"), ("f",), "class Solution: pass"),
        ("- so:\n  ```python\n  if 1:\n      print(1)\n  ```\n", (), "if 1:\n    print(1)"),
        (block("print(1)") + block("ls", "bash"), (), "print(1)"),
    ],
)
def test_the_program_is_found(response: str, names: tuple[str, ...], program: str) -> None:
    found = find_program(response, names)
    assert isinstance(found, str)
    assert found.rstrip("\n") == program


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ("no code here", Verdict.NO_CODE),
        ("", Verdict.NO_CODE),
        (block("  "), Verdict.NO_CODE),
        ("<think>" + block(READS), Verdict.NO_CODE),  # thinking never ended
        (block("ls", "bash"), Verdict.NO_CODE),
        (block("int main(){}", "cpp"), Verdict.UNSUPPORTED_LANGUAGE),
        (block("int main(){}", "c++") + block("7", ""), Verdict.UNSUPPORTED_LANGUAGE),
    ],
)
def test_no_program_is_a_verdict(response: str, verdict: Verdict) -> None:
    assert find_program(response) is verdict


def test_a_fence_inside_a_longer_fence_is_text() -> None:
    (only,) = fenced_blocks("````md\n```python\nx\n```\n````\n")
    assert (only.language, only.text) == ("md", "```python\nx\n```\n")


def test_a_million_fences_take_no_time() -> None:
    assert len(fenced_blocks("```\n" * 1_000_000)) == 500_000
