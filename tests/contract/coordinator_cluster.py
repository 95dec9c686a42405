"""A coordinator over real gRPC and a real Redis server, among fake workers (fake_workers.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from redis.asyncio import Redis

from rollpacker.rpc.client import call, open_channel
from rollpacker.rpc.server import RpcServer
from rollpacker.tasks import end_tasks
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from services.coordinator.runs import Runs
from services.coordinator.server import SERVICE_NAME, CoordinatorServicer
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.workers import WorkerRegistry
from tests.contract import fake_workers as fakes
from tests.tiny_run import write_tokenizer

ENDED = (pb.Run.STATE_SUCCEEDED, pb.Run.STATE_FAILED, pb.Run.STATE_STOPPED)


@dataclass
class Cluster:
    """Fake workers that outlive the coordinators of a test."""

    redis: Redis
    directory: Path
    rollouts: list[fakes.FakeRollout]
    reward: fakes.FakeReward
    trainer: fakes.FakeTrainer
    addresses: dict[str, tuple[str, pb.WorkerKind.ValueType]]


@dataclass
class Coordinator:
    stub: Any
    runs: Runs
    workers: WorkerRegistry
    lost: asyncio.Task[None]
    address: str = ""

    async def start(self, values: dict[str, Any], run_id: str = "r", **more: Any) -> pb.Run:
        struct = Struct()
        struct.update(values)
        request = pb.StartRunRequest(run_id=run_id, settings=struct, **more)
        return (await call(lambda: self.stub.StartRun(request, timeout=30))).run

    async def get(self, run_id: str = "r") -> pb.Run:
        return (await call(lambda: self.stub.GetRun(pb.GetRunRequest(run_id=run_id)))).run

    async def stop(self, mode: pb.StopMode.ValueType, run_id: str = "r") -> pb.Run:
        request = pb.StopRunRequest(run_id=run_id, mode=mode)
        return (await call(lambda: self.stub.StopRun(request, timeout=30))).run

    async def until_ended(self, run_id: str = "r", *, succeeded: bool = True) -> pb.Run:
        try:
            async with asyncio.timeout(240):
                while (run := await self.get(run_id)).state not in ENDED:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            for task in asyncio.all_tasks():
                print(task.get_name(), where_it_waits(task.get_coro()))
            print(await self.get(run_id))
            raise
        if succeeded:
            assert run.state == pb.Run.STATE_SUCCEEDED, run.failure
        return run

    async def steps(self, run_id: str = "r") -> list[pb.Step]:
        request = pb.ListStepsRequest(run_id=run_id)
        return list(reversed((await call(lambda: self.stub.ListSteps(request))).steps))

    async def schedule(self, run_id: str = "r") -> list[tuple[str, list[tuple[str, tuple]]]]:
        """What is trained where: per step its kind and the ordered (draw, seeds)."""
        return [
            (
                f"{step.round_kind}/{step.level}",
                [(f"{d.epoch}:{d.prompt_id}", tuple(d.seeds)) for d in step.draws],
            )
            for step in await self.steps(run_id)
        ]


def where_it_waits(coroutine: Any) -> str:
    """The chain of awaits of a coroutine, as file:line."""
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        else:
            places.append(repr(coroutine)[:80])
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(places)


@pytest.fixture
async def cluster(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Cluster]:
    write_tokenizer(tmp_path / "model")
    rollouts = [fakes.FakeRollout("rollout-0"), fakes.FakeRollout("rollout-1")]
    reward, trainer = fakes.FakeReward(), fakes.FakeTrainer(redis_client, fakes.TrainerDisk())
    servers = {
        "rollout-0": (fakes.rollout_server(rollouts[0]), pb.WORKER_KIND_ROLLOUT),
        "rollout-1": (fakes.rollout_server(rollouts[1]), pb.WORKER_KIND_ROLLOUT),
        "reward-0": (fakes.reward_server(reward), pb.WORKER_KIND_REWARD),
        "trainer-0": (fakes.trainer_server(trainer), pb.WORKER_KIND_TRAINER),
    }
    for server, _ in servers.values():
        await server.start()
        await server.set_serving(True)
    addresses = {name: (server.address, kind) for name, (server, kind) in servers.items()}
    yield Cluster(redis_client, tmp_path, rollouts, reward, trainer, addresses)
    await asyncio.gather(*(server.stop() for server, _ in servers.values()))


@asynccontextmanager
async def coordinator(
    cluster: Cluster, coordinator_id: str = "c", *, register: bool = True
) -> AsyncIterator[Coordinator]:
    """A coordinator; leaving the block is its crash (nothing is stopped cleanly)."""
    settings = CoordinatorSettings(
        redis_url="unused",
        run_directory=cluster.directory / "runs",
        coordinator_id=coordinator_id,
        coordinator_lease_seconds=10,
        worker_lease_seconds=600,
        worker_wait_seconds=60,
    )
    workers = WorkerRegistry(settings.worker_lease_seconds, settings.worker_wait_seconds)
    runs = Runs(cluster.redis, settings, workers)
    server = RpcServer(
        "127.0.0.1:0",
        [SERVICE_NAME],
        lambda s: pb_grpc.add_CoordinatorServiceServicer_to_server(
            CoordinatorServicer(runs, workers), s
        ),
    )
    await server.start()
    channel = open_channel(server.address)
    stub = pb_grpc.CoordinatorServiceStub(channel)
    task = asyncio.create_task(runs.run())
    if register:
        for name, (address, kind) in cluster.addresses.items():
            request = pb.HeartbeatRequest(worker_id=name, address=address, kind=kind)
            await stub.Heartbeat(request)
    while not runs.holds_lease and coordinator_id == "c":
        await asyncio.sleep(0)
    try:
        yield Coordinator(stub, runs, workers, task, server.address)
    finally:
        await end_tasks(task)
        await channel.close()
        await server.stop()
        await workers.close()
