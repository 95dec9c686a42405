"""The run that is driven here: what its driver is given, and the status that it ends with.

driver.run --returns a status--> succeeded | stopped
           --fails-------------> failed, with the reason
           --fence is stale----> (nothing: another coordinator drives the run now)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollpacker.data.run_data import RunData
from rollpacker.rpc.errors import FailedPreconditionError, ServiceError
from rollpacker.settings import RunSettings
from rollpacker.store.records import RunState
from rollpacker.store.run_store import RunStore, StaleFenceError
from services.coordinator.control import RunControl
from services.coordinator.driver import RunDriver
from services.coordinator.outputs import RunDirectoryError, RunOutputs
from services.coordinator.progress import RoundProgress
from services.coordinator.round_result import RoundFailedError
from services.coordinator.run_context import RunContext
from services.coordinator.workers import WorkerRegistry

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """The run that is driven; its data may still be loading, then the rest is None."""

    run_id: str
    driver: RunDriver | None = None
    control: RunControl | None = None
    task: asyncio.Task[None] | None = None
    # Held while a wish is written to Redis and told to `control`, and while `control` is made from
    # the wishes in Redis.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def run_context(
    state: RunState,
    settings: RunSettings,
    data: RunData,
    redis: Redis,
    workers: WorkerRegistry,
    directory: Path,
    fence: int,
    on_progress: Callable[[RoundProgress], None],
) -> RunContext:
    """What a driver needs. Raises FailedPreconditionError where the run's files cannot be read."""
    mode = settings.tail_batching.mode
    try:
        outputs = RunOutputs(directory, state.run_id, mode, state.settings)
    except (RunDirectoryError, OSError) as error:
        raise FailedPreconditionError("RUN_DIRECTORY", str(error)) from error
    return RunContext(
        run_id=state.run_id,
        settings=settings,
        data=data,
        redis=redis,
        workers=workers,
        outputs=outputs,
        fence=fence,
        on_progress=on_progress,
    )


async def drive(driver: RunDriver, store: RunStore, fence: int) -> None:
    """Drive a run to its end, and record how it ended."""
    run_id = store.run_id
    try:
        status = await driver.run()
        await store.set_status(fence, status)
        _log.info("run %s has %s", run_id, status)
    except StaleFenceError:
        _log.error("run %s is driven by another coordinator now", run_id)
    except (ServiceError, RoundFailedError, RedisError, OSError, ValueError) as error:
        if isinstance(error, ServiceError) and error.reason == "STALE_FENCE":
            _log.error("run %s is driven by another coordinator now: %s", run_id, error)
            return
        _log.exception("run %s has failed", run_id)
        await set_failed(store, fence, str(error))
    except Exception as error:
        _log.exception("run %s has failed", run_id)
        await set_failed(store, fence, f"a bug, see the coordinator's log: {error!r}")
        raise


async def set_failed(
    store: RunStore, fence: int, reason: str, *, only_from: Sequence[str] = ()
) -> None:
    """Record that a run has failed, if it can be recorded."""
    try:
        await store.set_status(fence, "failed", failure=reason, only_from=only_from)
    except (RedisError, StaleFenceError) as error:
        _log.error("the failure of run %s cannot be recorded: %s", store.run_id, error)
