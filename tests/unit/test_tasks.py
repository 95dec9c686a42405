"""Ending tasks."""

from __future__ import annotations

import asyncio

import pytest

from rollpacker.tasks import end_tasks


async def test_ending_waits_for_the_end_though_it_is_cancelled_itself() -> None:
    may_end, ended = asyncio.Event(), False

    async def stubborn() -> None:
        nonlocal ended
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue
        ended = True

    task = asyncio.create_task(stubborn())
    ending = asyncio.create_task(end_tasks(task))
    for _ in range(5):
        await asyncio.sleep(0)
        ending.cancel()
    assert not ending.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended
