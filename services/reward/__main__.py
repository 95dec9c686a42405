"""The reward service as a process: `python -m services.reward`."""

from __future__ import annotations

from functools import partial

import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollpacker.observability import set_up_logging
from rollpacker.rpc.heartbeat import run_heartbeat
from rollpacker.rpc.server import serve
from rollpacker.store.timeout_anchors import RedisTimeoutAnchors
from rollpacker.types import GraderKind
from rollpacker.v1 import coordinator_service_pb2
from services.reward.scheduler import RewardScheduler
from services.reward.server import make_server, report_graders
from services.reward.settings import RewardServiceSettings
from services.reward.worker_pool import WorkerPool


async def run(settings: RewardServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT; leaves no worker behind."""
    pool = WorkerPool(
        settings.slots,
        settings.time_limit_seconds,
        settings.waiting_per_slot,
        settings.graders,
        checked_graders=[GraderKind.CODE, GraderKind.JUDGE],
    )
    anchors = _shared_anchors(settings.redis_url)
    scheduler = RewardScheduler(pool, settings.timeouts, settings.recheck_share, anchors)
    async with pool, scheduler:
        server = make_server(settings.address, pool, scheduler)
        await report_graders(server, pool)
        heartbeat = partial(
            run_heartbeat, settings, coordinator_service_pb2.WORKER_KIND_REWARD, server.address
        )
        await serve(server, address_file=settings.address_file, background=[heartbeat])


def _shared_anchors(redis_url: str) -> RedisTimeoutAnchors | None:
    """Anchors in Redis, by a client that gives up soon: no response waits for them."""
    if not redis_url:
        return None
    redis = Redis.from_url(
        redis_url, socket_connect_timeout=1, socket_timeout=1, retry=Retry(NoBackoff(), 1)
    )
    return RedisTimeoutAnchors(redis)


def main() -> None:
    """Read the settings from the environment and run."""
    settings = RewardServiceSettings()
    set_up_logging("reward", settings.log_level)
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
