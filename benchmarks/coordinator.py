"""What a response costs the coordinator, at scale, with fake engines.

    python benchmarks/coordinator.py --replicas 64 --responses 20000 --rounds 3

The coordinator is the real one over real gRPC and a real Redis server, alone in its process. The
workers are fakes in other processes (tests/contract/fake_workers.py: no model, lengths are a
function of the seed), so that only the coordinator is measured. Prints JSON lines:
    coordinator_cpu_ms_per_response, responses_per_second (bounded by the fakes, too),
    resident_mib after each round (flat memory is the claim).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from google.protobuf.struct_pb2 import Struct

from rollpacker.rpc.client import call, open_channel
from rollpacker.rpc.server import RpcServer
from rollpacker.store.redis_client import connect
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from services.coordinator.runs import Runs
from services.coordinator.server import SERVICE_NAME, CoordinatorServicer
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.workers import WorkerRegistry
from tests.conftest import RunningRedis
from tests.contract import fake_workers as fakes
from tests.tiny_run import run_settings, write_tokenizer

RESPONSES_PER_PROMPT = 8


def fake_process(redis_url: str, names: list[str], pipe: Connection) -> None:
    """Host fake workers until the pipe closes."""
    asyncio.run(_host(redis_url, names, pipe))


async def _host(redis_url: str, names: list[str], pipe: Connection) -> None:
    redis = connect(redis_url)
    servers: dict[str, RpcServer] = {}
    for name in names:
        if name.startswith("rollout"):
            rollout = fakes.FakeRollout(name)
            rollout.slots = 4096
            servers[name] = fakes.rollout_server(rollout)
        elif name.startswith("reward"):
            servers[name] = fakes.reward_server(fakes.FakeReward())
        else:
            servers[name] = fakes.trainer_server(fakes.FakeTrainer(redis, fakes.TrainerDisk()))
    for server in servers.values():
        await server.start()
    pipe.send({name: server.address for name, server in servers.items()})
    await asyncio.to_thread(pipe.recv)


async def measure(directory: Path, redis_url: str, addresses: dict[str, str], args: Any) -> None:
    prompts = args.responses // RESPONSES_PER_PROMPT
    write_tokenizer(directory / "model")
    tail = {"prompts_per_step": prompts, "responses_per_prompt": RESPONSES_PER_PROMPT}
    values = run_settings(directory, prompts * args.rounds, tail_batching=tail)
    settings = CoordinatorSettings(redis_url=redis_url, run_directory=directory / "runs")
    workers = WorkerRegistry(lease_seconds=3600, wait_seconds=60)
    redis = connect(redis_url)
    runs = Runs(redis, settings, workers)
    servicer = CoordinatorServicer(runs, workers)
    server = RpcServer(
        "127.0.0.1:0",
        [SERVICE_NAME],
        lambda target: pb_grpc.add_CoordinatorServiceServicer_to_server(servicer, target),
    )
    await server.start()
    life = asyncio.create_task(runs.run())
    for name, address in addresses.items():
        kind = pb.WorkerKind.Value(f"WORKER_KIND_{name.partition('-')[0].upper()}")
        await workers.heartbeat(name, address, kind, None)
    async with open_channel(server.address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        struct = Struct()
        struct.update(values)
        await asyncio.sleep(0.2)
        cpu, wall = time.process_time(), time.perf_counter()
        await call(lambda: stub.StartRun(pb.StartRunRequest(run_id="scale", settings=struct)))
        await _follow(stub, args, cpu, wall)
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    await server.stop()
    await workers.close()
    await redis.aclose()


async def _follow(stub: Any, args: Any, cpu: float, wall: float) -> None:
    """Print the figures of each round as its step is committed."""
    seen = 0
    request = pb.GetRunRequest(run_id="scale")
    while seen < args.rounds:
        run = (await call(lambda: stub.GetRun(request))).run
        if run.state == pb.Run.STATE_FAILED:
            raise SystemExit(run.failure)
        if run.step > seen:
            now_cpu, now_wall = time.process_time(), time.perf_counter()
            step = (await call(lambda: stub.ListSteps(pb.ListStepsRequest(run_id="scale")))).steps[
                0
            ]
            responses = step.metrics["tail/launched_groups"] * RESPONSES_PER_PROMPT
            figure = {
                "round": int(step.step),
                "round_kind": step.round_kind,
                "replicas": args.replicas,
                "responses": int(responses),
                "coordinator_cpu_ms_per_response": (now_cpu - cpu) / responses * 1e3,
                "responses_per_second": responses / (now_wall - wall),
                "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            print(json.dumps({k: round(v, 3) for k, v in figure.items()}), flush=True)
            seen, cpu, wall = run.step, time.process_time(), time.perf_counter()
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--responses", type=int, default=20_000, help="kept per round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    names = [f"rollout-{i}" for i in range(args.replicas)] + ["reward-0", "trainer-0"]
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        redis = RunningRedis(directory / "redis")
        redis.start()
        here, there = context.Pipe()
        fakes_process = context.Process(target=fake_process, args=(redis.url, names, there))
        fakes_process.start()
        try:
            asyncio.run(measure(directory, redis.url, here.recv(), args))
        finally:
            here.send(None)
            fakes_process.join(10)
            fakes_process.kill()
            redis.stop()


if __name__ == "__main__":
    main()
