"""Grades a JSONL file without a server, through the same pool and graders as the service.

Each line holds {id, ground_truth, response}; `reward`, `verdict` and `why` may stand there too and
are ignored. The file is read as a whole first, so that a bad line stops it before any output.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.types import GraderKind, Verdict
from services.reward import grading
from services.reward.graders.grader import BadReferenceError, GraderFailedError, GradingTask
from services.reward.graders.registry import graders
from services.reward.settings import default_slots
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import WorkerLostError

_FIELDS = ("id", "ground_truth", "response")
_IGNORED = ("reward", "verdict", "why")
_log = logging.getLogger(__name__)
_WINDOW = 512  # responses in work at the same time


class GradeFileError(ValueError):
    """A line of the file is wrong; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class GradedLine:
    """The score of one line; no reward and no verdict when the scorer itself failed."""

    id: str
    reward: float | None
    verdict: Verdict | None

    def as_json(self) -> dict[str, Any]:
        """{id, reward, verdict}."""
        verdict = self.verdict.value if self.verdict else None
        return {"id": self.id, "reward": self.reward, "verdict": verdict}


def grade_math_file(
    path: Path, *, slots: int | None = None, time_limit_seconds: float = 5.0
) -> Iterator[GradedLine]:
    """Grade every line, in order. `slots` worker processes (default: one per core).

    Raises GradeFileError before the first line is graded, OSError when there is no such file.
    """
    rows = _read(path)
    pool = WorkerPool(slots or default_slots(), time_limit_seconds)
    with asyncio.Runner() as runner:
        runner.run(pool.start())
        try:
            for start in range(0, len(rows), _WINDOW):
                yield from runner.run(_grade_rows(pool, rows[start : start + _WINDOW]))
        finally:
            runner.run(pool.stop())


async def _grade_rows(pool: WorkerPool, rows: list[tuple[str, GradingTask]]) -> list[GradedLine]:
    return await asyncio.gather(*(_grade_row(pool, name, task) for name, task in rows))


async def _grade_row(pool: WorkerPool, name: str, task: GradingTask) -> GradedLine:
    try:
        score = (await grading.grade(pool, task)).score
    except (GraderFailedError, WorkerLostError) as error:
        _log.warning("%s: no reward: %s", name, error)
        return GradedLine(name, None, None)
    return GradedLine(name, score.reward, score.verdict)


def _read(path: Path) -> list[tuple[str, GradingTask]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_row(f"{path}, line {number}", line))
    return rows


def _row(place: str, line: str) -> tuple[str, GradingTask]:
    values = _object(place, line)
    for key in _FIELDS:
        if not isinstance(values.get(key), str):
            raise GradeFileError(f"{place}: {key}: {values.get(key)!r} is not text")
    for key in values:
        if key not in (*_FIELDS, *_IGNORED):
            raise GradeFileError(f"{place}: {key}: unknown field; known: {', '.join(_FIELDS)}")
    reference = json.dumps({"answer": values["ground_truth"]})
    try:
        graders()[GraderKind.MATH].check_reference(reference)
    except BadReferenceError as error:
        raise GradeFileError(f"{place}: ground_truth: {error}") from error
    return values["id"], GradingTask(GraderKind.MATH, values["response"], reference)


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise GradeFileError(f"{place}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise GradeFileError(f"{place}: must be an object with {', '.join(_FIELDS)}")
    return values
