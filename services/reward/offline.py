"""Grades a JSONL file without a server, through the same pool and graders as the service.

Mathematics: each line holds {id, ground_truth, response}. Code: {id, response, tests}, or the other
shapes of `graders/code_reference.py` in place of tests. `reward`, `verdict` and `why` may stand
there too and are ignored. The file is read as a whole first, so that a bad line stops it before any
output.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.policy.timeouts import TimeoutRules
from rollpacker.types import GraderKind
from services.reward import grading
from services.reward.graders.code import CodeSettings
from services.reward.graders.code_reference import KEYS as CODE_KEYS
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingTask,
    Score,
)
from services.reward.graders.registry import graders
from services.reward.settings import default_slots
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import WorkerLostError

__all__ = [
    "CODE_TIME_LIMIT_SECONDS",
    "GradeFileError",
    "GradedLine",
    "GraderUnavailableError",
    "grade_code_file",
    "grade_math_file",
]
_IGNORED = ("reward", "verdict", "why")
_log = logging.getLogger(__name__)
_WINDOW = 512  # responses in work at the same time
CODE_TIME_LIMIT_SECONDS = 10.0


class GradeFileError(ValueError):
    """A line of the file is wrong; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class GradedLine:
    """The score of one line; None when the scorer itself failed: no reward and no verdict."""

    id: str
    score: Score | None

    @property
    def reward(self) -> float | None:
        return self.score.reward if self.score else None

    @property
    def verdict(self) -> str | None:
        return self.score.verdict.value if self.score else None

    @property
    def cpu_seconds(self) -> float | None:
        """CPU time of the response's own program, over all its test cases."""
        return self.score.cpu_seconds if self.score else None

    def as_math_json(self) -> dict[str, Any]:
        return {"id": self.id, "reward": self.reward, "verdict": self.verdict}

    def as_code_json(self) -> dict[str, Any]:
        cpu = self.cpu_seconds
        return {
            "id": self.id,
            "verdict": self.verdict,
            "reward": self.reward,
            "cpu_seconds": None if cpu is None else round(cpu, 6),
        }


Row = tuple[str, GradingTask]


def grade_math_file(
    path: Path, *, slots: int | None = None, time_limit_seconds: float = 5.0
) -> Iterator[GradedLine]:
    """Grade every line, in order. `slots` worker processes (default: one per core).

    Raises GradeFileError before the first line is graded, OSError when there is no such file.
    """
    rows = _read(path, _math_row)
    yield from _grade(WorkerPool(slots or default_slots(), time_limit_seconds), rows)


def grade_code_file(
    path: Path,
    *,
    slots: int | None = None,
    time_limit_seconds: float = CODE_TIME_LIMIT_SECONDS,
) -> Iterator[GradedLine]:
    """Run every line's program in a sandbox, in order; the time limit is CPU time of a test case.

    Raises GradeFileError and OSError as above, and GraderUnavailableError when no sandbox can be
    made here.
    """
    rows = _read(path, _code_row)
    timeouts = TimeoutRules(time_limit_seconds, time_limit_seconds)
    graders_settings = {GraderKind.CODE: CodeSettings(timeouts=timeouts).as_json()}
    pool = WorkerPool(
        slots or default_slots(),
        time_limit_seconds,
        settings=graders_settings,
        checked_graders=[GraderKind.CODE],
    )
    yield from _grade(pool, rows)


def _grade(pool: WorkerPool, rows: list[Row]) -> Iterator[GradedLine]:
    with asyncio.Runner() as runner:
        runner.run(pool.start())
        try:
            for reason in pool.unavailable.values():
                raise GraderUnavailableError(reason)
            for start in range(0, len(rows), _WINDOW):
                yield from runner.run(_grade_rows(pool, rows[start : start + _WINDOW]))
        finally:
            runner.run(pool.stop())


async def _grade_rows(pool: WorkerPool, rows: list[Row]) -> list[GradedLine]:
    return await asyncio.gather(*(_grade_row(pool, name, task) for name, task in rows))


async def _grade_row(pool: WorkerPool, name: str, task: GradingTask) -> GradedLine:
    try:
        return GradedLine(name, (await grading.grade(pool, task)).score)
    except (GraderFailedError, WorkerLostError) as error:
        _log.warning("%s: no reward: %s", name, error)
        return GradedLine(name, None)


def _read(path: Path, to_row: Callable[[str, dict[str, Any]], Row]) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise GradeFileError(f"{path}: is not UTF-8 text; give a JSONL file") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            rows.append(to_row(place, _object(place, line)))
    return rows


def _math_row(place: str, values: dict[str, Any]) -> Row:
    fields = ("id", "ground_truth", "response")
    _require_texts(place, values, fields)
    _refuse_unknown(place, values, fields)
    task = GradingTask(
        GraderKind.MATH, values["response"], json.dumps({"answer": values["ground_truth"]})
    )
    _check_reference(f"{place}: ground_truth", task)
    return values["id"], task


def _code_row(place: str, values: dict[str, Any]) -> Row:
    _require_texts(place, values, ("id", "response"))
    _refuse_unknown(place, values, ("id", "response", *sorted(CODE_KEYS)))
    reference = {key: value for key, value in values.items() if key in CODE_KEYS}
    task = GradingTask(GraderKind.CODE, values["response"], json.dumps(reference))
    _check_reference(place, task)
    return values["id"], task


def _require_texts(place: str, values: dict[str, Any], fields: tuple[str, ...]) -> None:
    for key in fields:
        if not isinstance(values.get(key), str):
            raise GradeFileError(f"{place}: {key}: {values.get(key)!r} is not text")


def _refuse_unknown(place: str, values: dict[str, Any], fields: tuple[str, ...]) -> None:
    for key in values:
        if key not in (*fields, *_IGNORED):
            raise GradeFileError(f"{place}: {key}: unknown field; known: {', '.join(fields)}")


def _check_reference(place: str, task: GradingTask) -> None:
    try:
        graders()[task.grader_kind].check_reference(task.reference_json)
    except BadReferenceError as error:
        raise GradeFileError(f"{place}: {error}") from error


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise GradeFileError(f"{place}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise GradeFileError(f"{place}: must be an object with id and response")
    return values
