"""What a reward service shows to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from rollpacker.observability.metrics import Reading
from services.reward.scheduler import RewardScheduler
from services.reward.worker_pool import WorkerPool


def reward_readings(
    pool: WorkerPool, scheduler: RewardScheduler, verdicts: Mapping[tuple[str, str], int]
) -> list[Reading]:
    """Load, verdicts by (grader, verdict), and what time limits have cost."""
    counts = scheduler.counts
    counted = [
        Reading(
            "rollpacker_reward_verdicts",
            "responses graded",
            count,
            {"grader": grader, "verdict": verdict},
            is_counter=True,
        )
        for (grader, verdict), count in verdicts.items()
    ]
    return [
        Reading("rollpacker_reward_slots", "responses graded at once", pool.slot_count),
        Reading("rollpacker_reward_busy_slots", "slots at work", pool.busy_slot_count),
        *counted,
        *(
            Reading(name, meaning, value, is_counter=True)
            for name, meaning, value in (
                (
                    "rollpacker_reward_worker_restarts",
                    "grading workers replaced",
                    pool.worker_restart_count,
                ),
                ("rollpacker_reward_killed_runs", "programs over their limit", counts.killed),
                (
                    "rollpacker_reward_rechecked_runs",
                    "of those, run again with the longest limit",
                    counts.rechecked,
                ),
                ("rollpacker_reward_false_kills", "of those, right", counts.false_kills),
            )
        ),
    ]
