"""A Redis client under uvloop whose connections are reset."""

from __future__ import annotations

import asyncio

import pytest
import redis.exceptions
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollpacker.store.redis_client import connect, open_client
from tests.chaos.link import Cut, Link
from tests.conftest import RunningRedis


async def _reset(link: Link) -> None:
    """Reset the connections of a link, and let the loop notice."""
    await link.cut(Cut.REFUSED)
    await asyncio.sleep(0.05)


def test_a_connection_that_was_reset_is_a_lost_connection(redis_server: RunningRedis) -> None:
    async def write_after_a_reset() -> None:
        async with Link(lambda: redis_server.url) as link:
            client = open_client(f"redis://{link.address}/0", retry=Retry(NoBackoff(), 0))
            await client.ping()
            await _reset(link)
            with pytest.raises(redis.exceptions.ConnectionError):
                await client.ping()
            await client.aclose()

    uvloop.run(write_after_a_reset())


def test_a_client_that_is_connected_outlives_a_reset(redis_server: RunningRedis) -> None:
    async def go_on_after_a_reset() -> None:
        async with Link(lambda: redis_server.url) as link:
            client = connect(f"redis://{link.address}/0")
            await client.set("a", "1")
            await _reset(link)
            answer = asyncio.create_task(client.get("a"))
            await asyncio.sleep(0.05)
            await link.open()
            assert await answer == b"1"
            await client.aclose()

    uvloop.run(go_on_after_a_reset())
