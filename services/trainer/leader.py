"""The leader's side of the ranks: an asyncio face for the threads that do torch work and posting.

    Leader --torch thread--> replica 0 (its own)
       +----post thread----> queue of replica 1, 2, ...
       +----write thread---> files of checkpoints, beside the commands

Each replica runs its commands one after the other, in the order of the calls; the event loop stays
free, so health, GetTrainer and heartbeats are answered during an update. A caller that is cancelled
does not stop a command that was handed over: commands after it still see its effects. A window of
groups goes to one replica, which has at most two of them before it; so a slow replica holds up
neither the others nor the reading of the stream until all are that far behind.

An exception that is no refusal makes the leader *failed* for good: `watch` raises it, which ends
the process; no later command runs.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rollpacker.rpc.errors import UnavailableError
from services.trainer.model_loading import ModelNotFoundError
from services.trainer.packing import Window
from services.trainer.ranks import Ranks
from services.trainer.replica import (
    Accumulate,
    Command,
    GatherWeights,
    Open,
    Ping,
    Replica,
    SaveTensors,
    Shutdown,
    Update,
    WholeWeights,
)
from services.trainer.update import UpdateOutcome

_PING_SECONDS = 30.0
_WINDOWS_AHEAD = 2  # of a replica
_LOOK_SECONDS = 0.005  # between two looks for a free replica
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
        self._posts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="posts")
        self._writes = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writes")
        self._own_waiting = 0  # windows before replica 0
        self._loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    @property
    def replica_count(self) -> int:
        return self._ranks.replica_count

    @property
    def shard_size(self) -> int:
        return self._ranks.shard_size

    async def everywhere(self, command: Command) -> object:
        """The same command on all ranks. Raises ModelNotFoundError for Open."""
        commands = [command] * self.shard_size
        own = self._execute(commands)  # both are queued before anything is awaited
        for replica in range(1, self.replica_count):
            self._post(replica, commands)
        return await own

    async def open(self, command: Open) -> int:
        """Load a model; returns the size of its vocabulary. Raises ModelNotFoundError."""
        return cast(int, await self.everywhere(command))

    async def accumulate(self, windows: Sequence[Window], replica: int | None) -> None:
        """One window per rank of a replica, or of the first one that is free (None).

        Returns when the replica has taken them over; with one replica, when it is done. Nothing is
        sent when they are empty.
        """
        if not windows[0].micro_batches:
            return
        commands = [Accumulate(window) for window in windows]
        replica = await self._free_replica(
            range(self.replica_count) if replica is None else [replica]
        )
        if replica:
            self._post(replica, commands)
            return
        self._own_waiting += 1
        own = self._execute(commands)
        own.add_done_callback(self._own_done)
        if self.replica_count == 1:
            await own

    async def update(self) -> UpdateOutcome:
        """Apply the sums."""
        return cast(UpdateOutcome, await self.everywhere(Update()))

    async def gather_weights(self, with_base: bool = True) -> WholeWeights:
        """What is published, whole; see GatherWeights."""
        return cast(WholeWeights, await self.everywhere(GatherWeights(with_base)))

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Slow work of the leader alone, in order with the commands."""
        return await asyncio.shield(self._in_torch_thread(work))

    async def save_tensors(self, directory: Path) -> Future[Any]:
        """Copy the tensors; the future is done when all ranks have written their copy."""
        return cast("Future[Any]", await self.everywhere(SaveTensors(directory)))

    async def in_write_thread(self, work: Callable[[], Result]) -> Result:
        """Slow work of the leader alone, beside the commands and in order with its like."""
        work_done = self._loop.run_in_executor(self._writes, self._guard, work)
        return await asyncio.shield(work_done)

    async def watch(self) -> None:
        """For ever: sees to it that the ranks are alive. Raises what made the leader fail."""
        while self._failure is None:
            try:
                await asyncio.wait_for(self._failed.wait(), _PING_SECONDS)
            except TimeoutError:
                if self._ranks.world_size > 1:
                    await self.everywhere(Ping())
        raise self._failure

    async def close(self) -> None:
        """Let the ranks go, after what they are doing. Repeat: no effect."""
        if self._failure is None:
            await self.everywhere(Shutdown())
        self._posts.shutdown()
        self._thread.shutdown()
        self._writes.shutdown()

    def _execute(self, commands: Sequence[Command]) -> asyncio.Future[object]:
        """Queue commands for replica 0, one per rank of it."""

        def run() -> object:
            return self._replica.execute(self._ranks.scatter(commands))

        return asyncio.shield(self._in_torch_thread(run))

    def _post(self, replica: int, commands: Sequence[Command]) -> None:
        """Queue commands for another replica, one per rank of it."""
        queues = self._ranks.queues
        assert queues is not None, "there are other replicas"

        def put() -> None:
            queues.put(replica, pickle.dumps(list(commands)))

        self._posts.submit(self._guard, put)

    async def _free_replica(self, candidates: Sequence[int]) -> int:
        """The first one of them that has less than two windows before it; waits for one."""
        if self.replica_count == 1:
            return 0
        while True:
            for replica in candidates:
                if await self._waiting(replica) < _WINDOWS_AHEAD:
                    return replica
            await asyncio.sleep(_LOOK_SECONDS)

    async def _waiting(self, replica: int) -> int:
        queues = self._ranks.queues
        if replica == 0 or queues is None:
            return self._own_waiting
        count = partial(queues.waiting, replica)
        return await self._loop.run_in_executor(self._posts, self._guard, count)

    def _own_done(self, future: asyncio.Future[object]) -> None:
        self._own_waiting -= 1
        if not future.cancelled():
            future.exception()  # `watch` raises it

    def _in_torch_thread(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        return self._loop.run_in_executor(self._thread, self._guard, work)

    def _guard(self, work: Callable[[], Result]) -> Result:
        """Runs in a thread: no work after a failure."""
        if self._failure is not None:
            raise self._ending()
        try:
            return work()
        except ModelNotFoundError:
            raise
        except BaseException as error:
            self._failure = error
            self._loop.call_soon_threadsafe(self._failed.set)
            _log.exception("work for the ranks failed")
            raise self._ending() from error

    def _ending(self) -> UnavailableError:
        """What callers are told: the call may be repeated, to the process that follows. Some texts
        of torch.distributed are whole tracebacks: the last line says what was wrong."""
        said = str(self._failure).strip().rpartition("\n")[2] or repr(self._failure)
        return UnavailableError("TRAINER_FAILED", f"the trainer is ending: {said}")
