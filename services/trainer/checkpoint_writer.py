"""Checkpoints that are written while the trainer goes on.

    begin --torch threads copy--> written, a thread of each rank --write thread--> complete

States: *idle*, *writing* one. `begin` waits for the one before. What keeps a checkpoint from being
written makes the leader fail, which ends the process: no later step may look durable.
"""

from __future__ import annotations

import asyncio

from services.trainer.checkpoint import Checkpoint, CheckpointRecord, CheckpointStore
from services.trainer.leader import Leader


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, leader: Leader, store: CheckpointStore) -> None:
        self._leader = leader
        self._store = store
        self._writing: asyncio.Future[None] | None = None

    async def newest(self) -> Checkpoint | None:
        """The newest complete one, after the one that is being written."""
        await self.complete()
        return self._store.newest()

    async def begin(self, record: CheckpointRecord) -> None:
        """Copy the tensors of all ranks and start writing; returns when they may change again.

        Raises UnavailableError (TRAINER_FAILED), also for the checkpoint before.
        """
        await self.complete()
        version = record.weight_version
        partial = await self._leader.in_write_thread(lambda: self._store.begin(version))
        written = await self._leader.save_tensors(partial)

        def commit() -> None:
            written.result()
            self._store.commit(partial, record)

        self._writing = asyncio.ensure_future(self._leader.in_write_thread(commit))
        self._writing.add_done_callback(_retrieve)

    async def complete(self) -> None:
        """Wait until the last one is complete. Raises UnavailableError (TRAINER_FAILED)."""
        if self._writing is not None:
            await asyncio.shield(self._writing)


def _retrieve(writing: asyncio.Future[None]) -> None:
    """`Leader.watch` raises it."""
    if not writing.cancelled():
        writing.exception()
