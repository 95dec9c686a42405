"""The groups of a step in a real Redis server."""

from __future__ import annotations

from redis.asyncio import Redis

from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import Draw, PromptGroup


def group(number: int) -> PromptGroup:
    draw = Draw(0, f"p{number}", (number,))
    return PromptGroup("demo", 3, draw, (1, 2), (), 3, race_key=number, selection_weight=1.25)


async def test_every_group_is_read_once_in_the_order_of_the_stream(redis_client: Redis) -> None:
    stream = SampleStream(redis_client, "demo", 3)
    assert await stream.read_all() == []
    groups = [group(number) for number in range(300)]
    for each in (*groups[:290], groups[289], groups[4], *groups[290:]):  # replies that were lost
        await stream.append(each)
    assert await stream.read_all() == groups
