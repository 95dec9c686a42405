"""The tasks of one round: everything beside its loop. All of them end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollpacker.tasks import end_tasks


class RoundTasks:
    """An unforeseen failure of a task is told, and so ends the round instead of hanging it."""

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin one."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all, and wait for their end."""
        await end_tasks(*self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell(error)
