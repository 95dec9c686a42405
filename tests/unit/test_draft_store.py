"""Drafts in a real Redis server: replaced, read back, forgotten."""

from __future__ import annotations

from redis.asyncio import Redis

from rollpacker.store.draft_store import DraftStore
from rollpacker.types import Draft, DrawId

ONE, TWO = DrawId(0, "p:1"), DrawId(1, "p:1")
DRAFTS = (Draft(0, (1, 2, 3), 4), Draft(3, (2**31 - 1,), 5))


async def test_the_drafts_of_a_draw_are_read_back_and_replaced(redis_client: Redis) -> None:
    store = DraftStore(redis_client, "demo")
    await store.save({ONE: DRAFTS, TWO: ()})
    assert await store.load([TWO, ONE]) == {ONE: DRAFTS}
    await store.save({ONE: DRAFTS[:1]})
    assert await store.load([ONE]) == {ONE: DRAFTS[:1]}
    await store.save({ONE: ()})
    assert await store.load([ONE]) == {}


async def test_the_drafts_of_many_draws_are_kept_apart(redis_client: Redis) -> None:
    store = DraftStore(redis_client, "demo")
    drafts = {DrawId(0, f"p{i}"): (Draft(0, (i,), 4),) for i in range(300)}
    await store.save(drafts)
    assert await store.load([ONE, *drafts]) == drafts


async def test_deleted_drafts_leave_no_key(redis_client: Redis) -> None:
    store = DraftStore(redis_client, "demo")
    await store.save({ONE: DRAFTS, TWO: DRAFTS})
    await store.delete([ONE])
    await store.delete([])
    assert await store.load([ONE, TWO]) == {TWO: DRAFTS}
    await store.delete([ONE, TWO])
    assert await redis_client.keys("*deferred_draw*") == []
