"""The leader's side of the ranks: an asyncio face for the one thread that does torch work.

Commands run one after the other, in the order of the calls; the event loop stays free, so health,
GetTrainer and heartbeats are answered during an update. A caller that is cancelled does not stop
a command that was handed over: commands after it still see its effects.

An exception that is no refusal makes the leader *failed* for good: `watch` raises it, which ends
the process; no later command runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from rollpacker.rpc.errors import UnavailableError
from services.trainer.model import ModelNotFoundError
from services.trainer.packing import Window
from services.trainer.ranks import Ranks
from services.trainer.replica import (
    Accumulate,
    Command,
    GatherWeights,
    Ping,
    Replica,
    Shutdown,
    Update,
    WholeWeights,
)
from services.trainer.update import UpdateOutcome

_PING_SECONDS = 30.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Leader:
    """Sends commands to all ranks, this one included."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._replica = Replica(ranks)
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="torch", initializer=ranks.enter_thread
        )
        self._loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    async def everywhere(self, command: Command) -> object:
        """The same command on all ranks. Raises ModelNotFoundError for Open."""
        return await self._send([command] * self.world_size)

    async def accumulate(self, windows: Sequence[Window]) -> None:
        """One window per rank; nothing is sent when they are empty."""
        if windows[0].micro_batches:
            await self._send([Accumulate(window) for window in windows])

    async def update(self) -> UpdateOutcome:
        """Apply the sums."""
        return cast(UpdateOutcome, await self.everywhere(Update()))

    async def gather_weights(self) -> WholeWeights:
        """All weights, whole."""
        return cast(WholeWeights, await self.everywhere(GatherWeights()))

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Slow work of the leader alone, in order with the commands."""
        return await asyncio.shield(self._loop.run_in_executor(self._thread, self._guard, work))

    async def watch(self) -> None:
        """For ever: sees to it that the ranks are alive. Raises what made the leader fail."""
        while self._failure is None:
            try:
                await asyncio.wait_for(self._failed.wait(), _PING_SECONDS)
            except TimeoutError:
                if self.world_size > 1:
                    await self.everywhere(Ping())
        raise self._failure

    async def close(self) -> None:
        """Let the ranks go, after what they are doing. Repeat: no effect."""
        if self._failure is None:
            await self.everywhere(Shutdown())
        self._thread.shutdown()

    async def _send(self, commands: Sequence[Command]) -> object:
        def run() -> object:
            return self._replica.execute(self._ranks.scatter(commands))

        return await self.in_thread(run)

    def _guard(self, work: Callable[[], Result]) -> Result:
        """Runs in the thread: no work after a failure."""
        if self._failure is not None:
            raise self._ending()
        try:
            return work()
        except ModelNotFoundError:
            raise
        except BaseException as error:
            self._failure = error
            self._loop.call_soon_threadsafe(self._failed.set)
            _log.exception("the torch thread failed")
            raise self._ending() from error

    def _ending(self) -> UnavailableError:
        """What callers are told: the call may be repeated, to the process that follows."""
        return UnavailableError("TRAINER_FAILED", f"the trainer is ending: {self._failure}")
