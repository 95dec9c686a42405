"""What a run is made of: the one value that everything that drives it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from rollpacker.data.run_data import RunData
from rollpacker.settings import RunSettings
from services.coordinator.outputs import RunOutputs
from services.coordinator.progress import RoundProgress
from services.coordinator.workers import WorkerRegistry


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run that is driven by this process."""

    run_id: str
    settings: RunSettings
    data: RunData
    redis: Redis
    workers: WorkerRegistry
    outputs: RunOutputs
    fence: int
    on_progress: Callable[[RoundProgress], None]
