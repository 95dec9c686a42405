"""What a trainer shows to Prometheus: where it is. Losses and times are metrics of the step."""

from __future__ import annotations

from rollpacker.observability.metrics import Reading
from services.trainer.session import Activity, Session


def trainer_readings(session: Session, world_size: int) -> list[Reading]:
    """State, version and progress of the open step."""
    return [
        Reading(
            "rollpacker_trainer_weight_version",
            "optimizer updates applied",
            session.weight_version,
            {"run": session.run_id},
        ),
        Reading(
            "rollpacker_trainer_accumulated_groups",
            "groups of the open step in the sums",
            session.accumulated_group_count,
        ),
        Reading("rollpacker_trainer_ranks", "processes that train", world_size),
        *(
            Reading(
                "rollpacker_trainer_activity",
                "1 for what the trainer is doing",
                float(session.activity is activity),
                {"activity": activity.value},
            )
            for activity in Activity
        ),
    ]
