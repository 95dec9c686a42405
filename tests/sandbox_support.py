"""A code grader with its real sandboxes, and what tests ask it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollpacker.types import GraderKind
from services.reward.graders.code import CodeGrader
from services.reward.graders.grader import GradingTask, Score

CPU_LIMIT_SECONDS = 2.0


def new_grader(cpu_limit_seconds: float = CPU_LIMIT_SECONDS, **sandbox: Any) -> CodeGrader:
    """A grader that has proved its sandbox; `end` it."""
    grader = CodeGrader()
    timeouts = {"min_seconds": cpu_limit_seconds, "max_seconds": cpu_limit_seconds}
    grader.load({"timeouts": timeouts, "sandbox": sandbox})
    return grader


def score(grader: CodeGrader, program: str, **reference: Any) -> Score:
    """Grade a program by its tests."""
    response = f"```python\n{program}\n```"
    return grader.grade(GradingTask(GraderKind.CODE, response, json.dumps(reference)))


def verdict(grader: CodeGrader, program: str, **reference: Any) -> str:
    return score(grader, program, **reference).verdict.value


def descendants(pid: int) -> set[int]:
    """Every living process below a process."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        try:
            tasks = list(Path(f"/proc/{waiting.pop()}/task").iterdir())
            children = [(task / "children").read_text(encoding="ascii") for task in tasks]
        except OSError:
            continue
        waiting += [int(word) for text in children for word in text.split()]
        found |= set(waiting)
    return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
