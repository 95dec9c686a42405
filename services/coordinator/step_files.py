"""The files of a committed step, and the end of what only the open step needed.

The groups of a step stay in its sample stream until its files are written; so a crash after the
commit loses nothing, and `write` is simply repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from rollpacker.store.draft_store import DraftStore
from rollpacker.store.run_store import RunStore
from rollpacker.store.sample_stream import SampleStream
from services.coordinator.run_context import RunContext


class StepFiles:
    """Writes the files of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._store = RunStore(context.redis, context.run_id)
        self._drafts = DraftStore(context.redis, context.run_id)

    async def write(self, step: int) -> None:
        """Write a committed step's files, if its groups are still there; then drop the groups
        and the drafts of their draws. Repeat: no effect."""
        stream = SampleStream(self._context.redis, self._context.run_id, step)
        groups = {group.draw.id: group for group in await stream.read_all()}
        record = await self._store.record(step)
        if record is not None and (groups or not record.draws):
            ordered = [groups[draw.id] for draw in record.draws]
            await in_thread(partial(self._context.outputs.write_step, record, ordered))
        if record is not None:
            await self._drafts.delete(d.id for d in (*record.draws, *record.flat_draws))
        await self._store.forget_step(step)


async def in_thread(write: Callable[[], object]) -> None:
    """Let a thread write files. Cancelled, it still waits for the end: the next driver of the run
    must not meet a writer."""
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    writing.result()
