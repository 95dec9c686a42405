"""The heartbeat of a worker against a coordinator that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rollpacker.local_stack.ports import free_port
from rollpacker.rpc import client, errors
from rollpacker.rpc.heartbeat import run_heartbeat
from rollpacker.settings import WorkerSettings
from rollpacker.types import EngineStats
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.fake_coordinator import LEASE_SECONDS, server


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@asynccontextmanager
async def coordinator_at(address: str) -> AsyncIterator[None]:
    coordinator = server(address)
    await coordinator.start()
    try:
        yield
    finally:
        await coordinator.stop()


@pytest.fixture
async def beating() -> AsyncIterator[Callable[..., asyncio.Task[None]]]:
    """Starts heartbeats; they are cancelled at the end, which must end them."""
    tasks: list[asyncio.Task[None]] = []

    def start(*arguments: object) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(run_heartbeat(*arguments)))  # type: ignore[arg-type]
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def settings(address: str, **more: str) -> WorkerSettings:
    return WorkerSettings(worker_id="rollout-0", coordinator_address=address, **more)


async def workers(address: str) -> list[pb.Worker]:
    async with client.open_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        request = pb.ListWorkersRequest()
        response = await client.call_until(
            lambda: stub.ListWorkers(request, timeout=5), seconds=30, what="the coordinator"
        )
        return list(response.workers)


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_a_worker_registers_with_its_address_and_renews_its_statistics(
    address: str, beating: Callable[..., asyncio.Task[None]]
) -> None:
    beats = 0

    def stats() -> EngineStats:
        nonlocal beats
        beats += 1
        return EngineStats(running_response_count=beats)

    async with coordinator_at(address):
        beating(settings(address), pb.WORKER_KIND_ROLLOUT, "127.0.0.1:9", stats)
        await until(lambda: workers(address))
        (first,) = await workers(address)
        kind = pb.WORKER_KIND_ROLLOUT
        assert (first.worker_id, first.address, first.kind) == ("rollout-0", "127.0.0.1:9", kind)

        async def renewed_twice() -> bool:
            (now,) = await workers(address)
            before = first.engine_stats.running_response_count
            return now.engine_stats.running_response_count >= before + 2

        await until(renewed_twice)


async def test_the_advertised_address_replaces_the_bound_one(
    address: str, beating: Callable[..., asyncio.Task[None]]
) -> None:
    advertising = settings(address, advertise_address="10.0.0.1:5")
    async with coordinator_at(address):
        beating(advertising, pb.WORKER_KIND_REWARD, "127.0.0.1:9")
        await until(lambda: workers(address))
        assert (await workers(address))[0].address == "10.0.0.1:5"


async def test_a_worker_waits_for_its_coordinator_and_comes_back_to_a_new_one(
    address: str, beating: Callable[..., asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def logged(start: str) -> bool:
        return any(record.getMessage().startswith(start) for record in caplog.records)

    beating(settings(address), pb.WORKER_KIND_TRAINER, "127.0.0.1:9")
    await asyncio.sleep(LEASE_SECONDS)  # it finds nobody
    for _ in range(2):
        async with coordinator_at(address):
            await until(lambda: logged(f"registered at the coordinator {address}"))
            assert len(await workers(address)) == 1
        await until(lambda: logged(f"lost the coordinator {address}"))
        caplog.clear()


async def test_a_worker_that_is_refused_ends_with_the_reason(
    address: str, beating: Callable[..., asyncio.Task[None]]
) -> None:
    async with coordinator_at(address):
        task = beating(settings(address), pb.WORKER_KIND_UNSPECIFIED, "127.0.0.1:9")
        with pytest.raises(errors.InvalidArgumentError, match="kind: is not set"):
            await task
