"""`rollpacker watch` as a process beside a coordinator process that is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.struct_pb2 import Struct

from rollpacker.local_stack.ports import free_port
from rollpacker.rpc.client import call_until, open_channel
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.contract.test_coordinator_service import (
    Cluster,
    cluster,  # noqa: F401  a fixture
)
from tests.tiny_run import run_settings

WATCH = "from rollpacker.cli.main import app; app()"
PROMPTS, PER_STEP = 96, 4
KILLS_AT = (3, 12)  # steps that the watcher has told of


@asynccontextmanager
async def coordinator_process(
    address: str,
    cluster: Cluster,  # noqa: F811
    redis_url: str,
) -> AsyncIterator[pb_grpc.CoordinatorServiceAsyncStub]:
    """A real process that knows the fake workers; leaving the block is kill -9."""
    values = {
        "REDIS_URL": redis_url,
        "ADDRESS": address,
        "RUN_DIRECTORY": str(cluster.directory / "runs"),
        "COORDINATOR_LEASE_SECONDS": "1",
        "WORKER_LEASE_SECONDS": "600",
        "LOG_LEVEL": "WARNING",
    }
    environment = {f"ROLLPACKER_COORDINATOR_{name}": value for name, value in values.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.coordinator"), env=os.environ | environment
    )
    async with open_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        for name, (place, kind) in cluster.addresses.items():
            beat = pb.HeartbeatRequest(worker_id=name, address=place, kind=kind)
            await call_until(lambda: stub.Heartbeat(beat, timeout=60), seconds=60, what="it")  # noqa: B023
        try:
            yield stub
        finally:
            process.kill()
            await process.wait()


async def next_step(lines: asyncio.StreamReader, told: list[str]) -> int | None:
    """The number of the next step that the watcher tells of; None at its end."""
    async with asyncio.timeout(120):
        while line := (await lines.readline()).decode().rstrip():
            told.append(line)
            if found := re.match(r"step (\d+) ", line):
                return int(found[1])
    return None


async def test_a_watcher_tells_every_step_once_though_the_coordinator_is_killed(
    cluster: Cluster,  # noqa: F811
    redis_url: str,
) -> None:
    for rollout in cluster.rollouts:
        rollout.token_seconds = 0.004  # the run must still go on when its coordinator is killed
    gate = cluster.reward.hold()  # and no step may be over when the watcher begins
    address = f"127.0.0.1:{free_port()}"
    told: list[str] = []
    steps: list[int] = []
    struct = Struct()
    struct.update(run_settings(cluster.directory, prompts=PROMPTS))
    start = pb.StartRunRequest(run_id="r", settings=struct)
    watch = None
    for kill_at in (*KILLS_AT, None):
        async with coordinator_process(address, cluster, redis_url) as stub:
            await call_until(lambda: stub.StartRun(start, timeout=60), seconds=60, what="it")  # noqa: B023
            watch = watch or await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", WATCH, "watch", "r"),
                env=os.environ | {"ROLLPACKER_COORDINATOR": address, "COLUMNS": "200"},
                stdout=asyncio.subprocess.PIPE,
            )
            assert watch.stdout is not None
            if not told:
                told.append((await watch.stdout.readline()).decode().rstrip())
                gate.set()
            while (step := await next_step(watch.stdout, told)) is not None:
                steps.append(step)
                if step == kill_at:
                    break
    assert watch is not None
    assert await watch.wait() == 0
    assert steps == list(range(PROMPTS // PER_STEP))
    states = [line.partition(":")[0] for line in told if line.startswith("r ")]
    assert states == list(dict.fromkeys(states))
    assert states[-1] == "r succeeded"
