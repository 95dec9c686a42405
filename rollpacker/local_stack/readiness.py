"""What is not ready yet: asked of the servers themselves, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.exceptions import RedisError

from rollpacker.rpc import client, errors
from rollpacker.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

_DEADLINE_SECONDS = 2.0


async def redis_answers(url: str) -> bool:
    """Whether the server has loaded its data and answers."""
    async with redis.asyncio.Redis.from_url(url, socket_timeout=_DEADLINE_SECONDS) as connection:
        try:
            return bool(await connection.ping())
        except (RedisError, OSError):
            return False


async def not_ready(
    channel: grpc.aio.Channel, coordinator: str, workers: Sequence[str]
) -> list[str]:
    """The coordinator's name while it does not serve, else the workers without a lease."""
    health = health_pb2_grpc.HealthStub(channel)
    stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
    try:
        answer = await client.call(
            lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_SECONDS)
        )
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            return [coordinator]
        listed = await client.call(
            lambda: stub.ListWorkers(
                coordinator_service_pb2.ListWorkersRequest(), timeout=_DEADLINE_SECONDS
            )
        )
    except (errors.UnavailableError, errors.DeadlineExceededError):
        return [coordinator]
    registered = {worker.worker_id for worker in listed.workers}
    return [name for name in workers if name not in registered]
