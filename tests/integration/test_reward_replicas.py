"""Two reward services, one name and one Redis: they share the load and what they learn."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.rpc import client
from rollpacker.v1 import reward_service_pb2 as pb
from rollpacker.v1 import reward_service_pb2_grpc, types_pb2
from tests.conftest import RunningRedis

T_MAX = 40.0
QUICK = "print(2 * int(input()))"
ENDLESS = "while True: pass"


@dataclass
class Replicas:
    """Stubs: of each replica, and of the name that stands for both."""

    each: list[Any]
    both: Any


@asynccontextmanager
async def replica(directory: Path, name: str, redis_url: str) -> AsyncIterator[str]:
    address_file = directory / name
    environment = {
        **os.environ,
        "ROLLPACKER_REWARD_WORKER_ID": name,
        "ROLLPACKER_REWARD_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "ROLLPACKER_REWARD_ADDRESS_FILE": str(address_file),
        "ROLLPACKER_REWARD_SLOTS": "1",
        "ROLLPACKER_REWARD_REDIS_URL": redis_url,
        "ROLLPACKER_REWARD_CODE_TIME_LIMIT_MIN_SECONDS": "0.2",
        "ROLLPACKER_REWARD_CODE_TIME_LIMIT_MAX_SECONDS": str(T_MAX),
    }
    process = subprocess.Popen([sys.executable, "-m", "services.reward"], env=environment)
    try:
        while not address_file.exists():
            assert process.poll() is None
            await asyncio.sleep(0.05)
        yield address_file.read_text()
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


@asynccontextmanager
async def replicas(directory: Path, redis_url: str) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        made = [replica(directory, f"reward-{number}", redis_url) for number in range(2)]
        addresses = [await stack.enter_async_context(one) for one in made]
        channels = [client.open_channel(address) for address in addresses]
        name = f"ipv4:{','.join(addresses)}"  # what a name with two addresses resolves to
        channels.append(client.open_channel(name, takes_turns=True))
        for channel in channels:
            await stack.enter_async_context(channel)
        stubs = [reward_service_pb2_grpc.RewardServiceStub(channel) for channel in channels]
        yield Replicas(stubs[:2], stubs[2])


async def score(stub: Any, program: str, prompt_id: str) -> pb.ScoreResponseResponse:
    request = pb.ScoreResponseRequest(
        run_id="run",
        response_text=f"```python\n{program}\n```",
        grader_kind=types_pb2.GRADER_KIND_CODE,
        reference_json=json.dumps({"tests": [["21", "42"]]}),
        prompt_id=prompt_id,
    )
    return await client.call(lambda: stub.ScoreResponse(request, timeout=250))


async def killed(stub: Any) -> int:
    answer = await client.call(lambda: stub.GetReward(pb.GetRewardRequest(), timeout=60))
    return int(answer.killed_run_count)


async def test_two_replicas_behind_one_name_share_load_and_time_limits(
    redis_server: RunningRedis, tmp_path: Path
) -> None:
    async with replicas(tmp_path, redis_server.url) as found:
        one, other = found.each
        assert (await score(one, QUICK, "p")).reward == 1.0
        late = await score(other, ENDLESS, "p")
        assert late.verdict == types_pb2.VERDICT_TIMED_OUT
        assert late.program_cpu.ToTimedelta().total_seconds() < T_MAX / 4  # by the other's anchor
        before = [await killed(one), await killed(other)]
        while (after := [await killed(one), await killed(other)])[0] == before[0] or (
            after[1] == before[1]
        ):  # calls take turns once both are connected
            await asyncio.gather(*(score(found.both, ENDLESS, "p") for _ in range(2)))
