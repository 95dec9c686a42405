"""The walk-through of docs/api.md, carried out word for word by grpcurl through reflection."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

from rollpacker.rpc.errors import NotFoundError
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
DOCUMENT = Path(__file__).parents[2] / "docs/api.md"


def walkthrough() -> str:
    """The commands of the document."""
    found = re.search(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found
    return found[1]


async def pauses(c: Coordinator) -> bool:
    """Whether the wish to pause is there."""
    try:
        return (await c.get("demo")).state == pb.Run.STATE_PAUSING
    except NotFoundError:
        return False


async def test_the_walkthrough_drives_a_whole_run(cluster: Cluster) -> None:
    gate = cluster.reward.hold()
    async with coordinator(cluster) as c:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euo",
            "pipefail",
            "-c",
            walkthrough().replace("sleep 1", "sleep 0.1"),
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(cluster.directory),
                "COORDINATOR": c.address,
                "SETTINGS": json.dumps(run_settings(cluster.directory)),
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        ending = asyncio.create_task(process.communicate())
        while not ending.done() and not await pauses(c):  # fakes are faster than any tool
            await asyncio.sleep(0.02)
        gate.set()
        out, err = await ending
        run = await c.get("demo")
    assert process.returncode == 0, err.decode()
    text = out.decode()
    assert "rollpacker.v1.CoordinatorService" in text
    for said in ('"trainer-0"', '"STATE_PAUSED"', '"STATE_SUCCEEDED"'):
        assert said in text
    assert text.count('"step_finished"') == run.step == 7
    assert '"added_count": 1' in text
