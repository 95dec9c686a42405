"""What a response costs the coordinator, at scale, with fake engines.

    python benchmarks/coordinator.py --responses 100000 --rounds 1
    python benchmarks/coordinator.py --responses 2000 --rounds 200 --every 20

The coordinator is the real one over real gRPC and a real Redis server, alone in its process. The
workers are fakes in another process (`BriefRollout` below: no model, lengths are a function of the
seed), so only the coordinator is measured; both share the cores of the machine. By default 64
replicas hold 512 groups of 8 responses each at once. Prints a JSON line per `--every` rounds:
    coordinator_cpu_ms_per_response   CPU time of its process / launched responses
    responses_per_second              bounded by the fakes, too
    scheduling_ms_p50, _p99           from an event's arrival to the policy's answer to it
    loop_held_ms_max                  the longest that nothing else of the coordinator had its turn
    resident_mib                      after these rounds
and at the end, over several lines, how much memory grew in the second half of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop
from google.protobuf.struct_pb2 import Struct

from rollpacker import round_log
from rollpacker.policy.commands import Command
from rollpacker.policy.events import Event
from rollpacker.policy.round import Round
from rollpacker.rpc.client import call, open_channel
from rollpacker.rpc.errors import FailedPreconditionError
from rollpacker.rpc.server import RpcServer
from rollpacker.store.redis_client import connect
from rollpacker.tasks import end_tasks
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
GROUPS_PER_REPLICA = 512
PROGRESS_TOKENS = 16  # as the coordinator asks for
RUN_ID = "scale"


class BriefRollout(fakes.FakeRollout):
    """A fake that says as much as an engine does: progress every 16 tokens, and each response."""

    async def GenerateGroup(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002
        if request.weight_version != self.spec.weight_version:
            raise FailedPreconditionError("WEIGHT_VERSION_MISMATCH", "other weights")
        seeds, version = request.draw.seeds, request.weight_version
        whole = {i: fakes.fake_tokens(seeds[i], version) for i in request.indices}
        nothing = dict.fromkeys(whole, 0)
        told, held = dict(nothing), dict(nothing)
        open_ones = set(whole)
        lengths = {len(tokens) for tokens in whole.values()}
        for length in sorted(lengths | set(range(PROGRESS_TOKENS, max(lengths), PROGRESS_TOKENS))):
            await asyncio.sleep(0)
            held |= dict.fromkeys(open_ones, length)
            if length % PROGRESS_TOKENS == 0:
                yield self._progress(open_ones, whole, held, nothing, told)
            for index in [i for i in open_ones if len(whole[i]) == length]:
                yield self._finished(request, index, whole[index], nothing, {})
                open_ones.discard(index)


@dataclass
class Latencies:
    """How long events waited for the policy, in milliseconds."""

    waits: list[float] = field(default_factory=list)

    def take(self) -> dict[str, float]:
        """Quantiles since the last call."""
        waits, self.waits = sorted(self.waits), []
        return {
            f"scheduling_ms_p{share}": waits[min(len(waits) - 1, len(waits) * share // 100)]
            for share in (50, 99)
            if waits
        }


LATENCIES = Latencies()


@dataclass
class LoopWatch:
    """The longest time for which the event loop was held."""

    longest_ms: float = 0.0

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            self.longest_ms = max(self.longest_ms, (time.monotonic() - before) * 1e3 - 5)

    def take(self) -> dict[str, float]:
        """Since the last call."""
        longest, self.longest_ms = self.longest_ms, 0.0
        return {"loop_held_ms_max": longest}


LOOP = LoopWatch()


class TimedRound(Round):
    """The policy, with a clock beside it."""

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        LATENCIES.waits.append((time.monotonic() - event.at) * 1e3)
        return commands


def fake_process(redis_url: str, names: list[str], pipe: Connection) -> None:
    """Host fake workers until the pipe closes."""
    uvloop.run(_host(redis_url, names, pipe))


async def _host(redis_url: str, names: list[str], pipe: Connection) -> None:
    redis = connect(redis_url)
    servers: dict[str, RpcServer] = {}
    for name in names:
        if name.startswith("rollout"):
            rollout = BriefRollout(name)
            rollout.slots = GROUPS_PER_REPLICA * RESPONSES_PER_PROMPT
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
    tail = {
        "mode": args.mode,
        "prompts_per_step": prompts,
        "responses_per_prompt": RESPONSES_PER_PROMPT,
    }
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
    watch = asyncio.create_task(LOOP.run())
    for name, address in addresses.items():
        kind = pb.WorkerKind.Value(f"WORKER_KIND_{name.partition('-')[0].upper()}")
        await workers.heartbeat(name, address, kind, None)
    async with open_channel(server.address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        struct = Struct()
        struct.update(values)
        await asyncio.sleep(0.2)
        meter = Meter(args)
        await call(lambda: stub.StartRun(pb.StartRunRequest(run_id=RUN_ID, settings=struct)))
        await _follow(stub, meter, args.rounds)
        meter.end()
    await end_tasks(life, watch)
    await server.stop()
    await workers.close()
    await redis.aclose()


class Meter:
    """Prints the figures of every few rounds."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._responses = 0.0
        self._resident: list[float] = []

    def committed(self, step: pb.Step) -> None:
        self._responses += step.metrics["tail/launched_groups"] * RESPONSES_PER_PROMPT
        if (step.step + 1) % self._args.every:
            return
        cpu, wall = time.process_time(), time.perf_counter()
        self._resident.append(_resident_mib())
        figure = {
            "round": int(step.step),
            "replicas": self._args.replicas,
            "responses": int(self._responses),
            "coordinator_cpu_ms_per_response": (cpu - self._cpu) / self._responses * 1e3,
            "responses_per_second": self._responses / (wall - self._wall),
            **LATENCIES.take(),
            **LOOP.take(),
            "resident_mib": self._resident[-1],
        }
        print(json.dumps({k: round(v, 3) for k, v in figure.items()}), flush=True)
        self._cpu, self._wall, self._responses = cpu, wall, 0.0

    def end(self) -> None:
        if len(self._resident) > 3:
            middle = self._resident[len(self._resident) // 2]
            grown = self._resident[-1] - middle
            print(json.dumps({"resident_mib_grown_in_second_half": round(grown, 3)}), flush=True)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def _follow(stub: Any, meter: Meter, rounds: int) -> None:
    """Hear of every step as it is committed, as a watcher would."""
    async for event in stub.WatchRun(pb.WatchRunRequest(run_id=RUN_ID)):
        if event.run_changed.state == pb.Run.STATE_FAILED:
            raise SystemExit(event.run_changed.failure)
        if event.HasField("step_finished"):
            meter.committed(event.step_finished)
            if event.step_finished.step + 1 == rounds:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--responses", type=int, default=20_000, help="kept per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="rounds per line")
    parser.add_argument("--mode", default="exact", help="exact launches more than it keeps")
    args = parser.parse_args()
    round_log.Round = TimedRound  # type: ignore[misc]
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
            uvloop.run(measure(directory, redis.url, here.recv(), args))
        finally:
            here.send(None)
            fakes_process.join(10)
            fakes_process.kill()
            redis.stop()


if __name__ == "__main__":
    main()
