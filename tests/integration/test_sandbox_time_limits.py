"""Time limits that follow correct runs, with real sandboxes and a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from rollpacker.policy.timeouts import TimeoutRules
from rollpacker.store import keys
from rollpacker.store.timeout_anchors import RedisTimeoutAnchors
from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import GradingTask, TestRun
from services.reward.scheduler import MemoryTimeoutAnchors, RewardScheduler, TimeoutAnchors
from services.reward.worker_pool import WorkerPool
from tests.conftest import RunningRedis

RULES = TimeoutRules(min_seconds=0.2, max_seconds=3.0, relaxation=1.5)
QUICK = "print(2 * int(input()))"
SLOW = "import time\nwhile time.process_time() < 0.6: pass\nprint(2 * int(input()))"
ENDLESS = "while True: pass"


@asynccontextmanager
async def running(
    recheck_share: float = 0.0, anchors: TimeoutAnchors | None = None
) -> AsyncIterator[RewardScheduler]:
    rules = {"min_seconds": 0.2, "max_seconds": 3.0, "relaxation": 1.5}
    settings = {GraderKind.CODE: {"timeouts": rules}}
    async with (
        WorkerPool(1, 5.0, settings=settings) as pool,
        RewardScheduler(pool, RULES, recheck_share, anchors) as scheduler,
    ):
        yield scheduler


async def run(scheduler: RewardScheduler, program: str, prompt_id: str = "p") -> TestRun:
    reference = json.dumps({"tests": [["21", "42"]]})
    task = GradingTask(GraderKind.CODE, f"```python\n{program}\n```", reference)
    (only,) = (await scheduler.grade("run", prompt_id, task)).score.runs
    return only


async def test_a_limit_is_t_max_until_a_run_is_correct_and_then_follows_it() -> None:
    async with running() as scheduler:
        assert (await run(scheduler, "print(1)")).limit_seconds == RULES.max_seconds
        first = await run(scheduler, QUICK)  # an incorrect run has set no anchor
        assert (first.verdict, first.limit_seconds) == (Verdict.CORRECT, RULES.max_seconds)
        killed = await run(scheduler, ENDLESS)
        assert (killed.verdict, killed.limit_seconds) == (Verdict.TIMED_OUT, RULES.min_seconds)
        assert (await run(scheduler, QUICK, "other")).limit_seconds == RULES.max_seconds
        assert scheduler.counts.killed == 1


async def test_a_false_kill_is_found_in_idle_time_and_not_repeated() -> None:
    async with running(recheck_share=1.0) as scheduler:
        await run(scheduler, QUICK)
        assert (await run(scheduler, SLOW)).verdict is Verdict.TIMED_OUT
        async with asyncio.timeout(120):
            while scheduler.counts.rechecked < 1:
                await asyncio.sleep(0.05)
        assert scheduler.counts.false_kills == 1
        again = await run(scheduler, SLOW)
        assert again.verdict is Verdict.CORRECT
        assert again.limit_seconds > 0.6
        assert (await run(scheduler, ENDLESS)).verdict is Verdict.TIMED_OUT
        async with asyncio.timeout(120):
            while scheduler.counts.rechecked < 2:
                await asyncio.sleep(0.05)
        assert scheduler.counts.false_kills == 1  # the endless one was no false kill


async def test_replicas_share_anchors_through_redis_and_find_them_after_a_restart(
    redis_server: RunningRedis,
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    anchors = RedisTimeoutAnchors(client)
    async with running(anchors=anchors) as one:
        await run(one, QUICK)
    async with running(anchors=anchors) as other:
        assert (await run(other, QUICK)).limit_seconds == RULES.min_seconds
    await client.aclose()


async def test_anchors_only_grow_and_expire(redis_server: RunningRedis) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    for anchors in (RedisTimeoutAnchors(client), MemoryTimeoutAnchors()):
        assert await anchors.get("run", "p") == {}
        await anchors.raise_to("run", "p", {"0": 1.5, "1": 0.5})
        await anchors.raise_to("run", "p", {"0": 1.0, "1": 0.75})
        await anchors.raise_to("run", "p", {})
        assert await anchors.get("run", "p") == {"0": 1.5, "1": 0.75}
        assert await anchors.get("other", "p") == {}
    assert await client.ttl(keys.timeout_anchors("run", "p")) > 0
    await client.aclose()


async def test_grading_goes_on_while_redis_is_away(redis_server: RunningRedis) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=1)
    async with running(anchors=RedisTimeoutAnchors(client)) as scheduler:
        redis_server.kill()
        assert (await run(scheduler, QUICK)).verdict is Verdict.CORRECT
        assert (await run(scheduler, QUICK)).limit_seconds == RULES.min_seconds
    await client.aclose()
