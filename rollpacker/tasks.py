"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_SECONDS = 0.2


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until all have ended; their results and errors are dropped.

    Cancels again and again: on Python 3.11 `asyncio.wait_for`, which libraries use, returns a
    result that arrives together with the cancellation and so swallows it (gh-86296). For the same
    reason it is itself cancelled more than once: it still waits for the end, and raises then.
    """
    left = {task for task in tasks if task is not None}
    cancelled: asyncio.CancelledError | None = None
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
        for task in [task for task in left if task.done()]:
            left.discard(task)
            if not task.cancelled():
                task.exception()  # seen: asyncio need not report it
    if cancelled is not None:
        raise cancelled
