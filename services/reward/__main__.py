"""The reward service as a process: `python -m services.reward`."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollpacker.devices.holder import Devices, worker_devices
from rollpacker.observability import set_up_logging
from rollpacker.observability.metrics import serve_metrics
from rollpacker.observability.tracing import set_up_tracing
from rollpacker.rpc.heartbeat import run_heartbeat
from rollpacker.rpc.server import serve
from rollpacker.settings import read_service_settings
from rollpacker.store.redis_client import open_client
from rollpacker.store.timeout_anchors import RedisTimeoutAnchors
from rollpacker.types import GraderKind
from rollpacker.v1 import coordinator_service_pb2
from services.reward.judge_process import JudgeProcess
from services.reward.readings import reward_readings
from services.reward.run_code import SideDoor
from services.reward.scheduler import RewardScheduler
from services.reward.server import make_server, report_graders
from services.reward.settings import RewardServiceSettings
from services.reward.worker_pool import WorkerPool


async def run(settings: RewardServiceSettings) -> None:
    """Serve until SIGTERM or SIGINT; leaves no process behind."""
    async with AsyncExitStack() as stack:
        devices = worker_devices(
            settings, settings.meter(), bound=False, guest_bytes=settings.judge_guest_bytes
        )
        stack.push_async_callback(devices.leave)
        judge = await _judge(settings, stack, devices)
        graders = dict(settings.graders)
        graders[GraderKind.JUDGE] = {**graders[GraderKind.JUDGE], **judge}
        pool = WorkerPool(
            settings.slots,
            settings.time_limit_seconds,
            settings.waiting_per_slot,
            graders,
            checked_graders=[GraderKind.CODE, GraderKind.JUDGE],
        )
        anchors = _shared_anchors(settings.redis_url)
        scheduler = RewardScheduler(pool, settings.timeouts, settings.recheck_share, anchors)
        await stack.enter_async_context(pool)
        await stack.enter_async_context(scheduler)
        verdicts: Counter[tuple[str, str]] = Counter()
        server = make_server(settings.address, pool, scheduler, verdicts)
        await report_graders(server, pool)
        if settings.run_code_address:
            limit = settings.code_time_limit_max_seconds
            door = SideDoor(settings.run_code_address, settings.run_code_token, pool, limit)
            stack.enter_context(door)
        heartbeat = partial(
            run_heartbeat,
            settings,
            coordinator_service_pb2.WORKER_KIND_REWARD,
            server.address,
            reward_slot_count=pool.slot_count,
        )
        metrics = partial(
            serve_metrics,
            settings.metrics_address,
            partial(reward_readings, pool, scheduler, verdicts),
        )
        await serve(
            server,
            address_file=settings.address_file,
            background=[heartbeat, metrics, devices.keep],
        )


async def _judge(
    settings: RewardServiceSettings, stack: AsyncExitStack, devices: Devices
) -> dict[str, str]:
    """Start the judge that is a child of this service, if it is one; what its grader must know."""
    child = settings.judge_process
    if child is None:
        return {}
    if missing := child.missing():
        return {"unavailable": missing}
    judge = await stack.enter_async_context(JudgeProcess(child, devices))
    return {"url": judge.url, "api_key": judge.token}


def _shared_anchors(redis_url: str) -> RedisTimeoutAnchors | None:
    """Anchors in Redis, by a client that gives up soon: no response waits for them."""
    if not redis_url:
        return None
    redis = open_client(
        redis_url, socket_connect_timeout=1, socket_timeout=1, retry=Retry(NoBackoff(), 1)
    )
    return RedisTimeoutAnchors(redis)


def main() -> None:
    """Read the settings from the environment and run."""
    settings = read_service_settings(RewardServiceSettings)
    set_up_logging("reward", settings.log_level, settings.log_format, settings.worker_id)
    set_up_tracing("reward", settings.trace_endpoint, settings.worker_id)
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
