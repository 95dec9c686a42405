"""Scores one response by the quickest way that decides it: at once, or in a worker.

The server and the offline command both go through here, so that they cannot differ.
"""

from __future__ import annotations

import time

from services.reward.graders.grader import GradingTask
from services.reward.graders.registry import graders
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import GradingOutcome


async def grade(pool: WorkerPool, task: GradingTask) -> GradingOutcome:
    """Score one response. The grader must be offered (`registry.graders`).

    Raises BadReferenceError, GraderFailedError, GraderUnavailableError, SlotsBusyError,
    WorkerLostError.
    """
    pool.require(task.grader_kind)
    start = time.monotonic()
    score = graders()[task.grader_kind].grade_now(task)
    if score is not None:
        return GradingOutcome(score, time.monotonic() - start)
    return await pool.grade(task)
