"""Settings of the reward service; each may be given as ROLLPACKER_REWARD_<NAME>."""

from __future__ import annotations

import os

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rollpacker.settings import WorkerSettings
from services.reward.worker_pool import WAITING_PER_SLOT


def default_slots() -> int:
    """One worker per core."""
    return os.cpu_count() or 1


class RewardServiceSettings(WorkerSettings):
    """See the fields."""

    model_config = SettingsConfigDict(env_prefix="ROLLPACKER_REWARD_")

    slots: int = Field(
        default_factory=default_slots, ge=1, le=1024, description="grading worker processes"
    )
    time_limit_seconds: float = Field(
        5.0, gt=0, le=3600, description="CPU time that one response may take to grade"
    )
    waiting_per_slot: int = Field(
        WAITING_PER_SLOT, ge=1, description="responses per slot that may wait before SLOTS_BUSY"
    )
