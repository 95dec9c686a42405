"""The walk-through of docs/api.md, carried out word for word through reflection.

With grpcurl where there is one; else with `buf curl`, which is in the development environment and
speaks the same reflection: a shell function gives it grpcurl's arguments.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from rollpacker.rpc.errors import NotFoundError
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
DOCUMENT = Path(__file__).parents[2] / "docs/api.md"
BUF_AS_GRPCURL = """
grpcurl() {
  shift  # -plaintext
  local data="{}"
  if [ "$1" = -d ]; then data="$2"; shift 2; fi
  if [ "$2" = list ]; then set -- "http://$1" --list-services; else set -- "http://$1/$2"; fi
  "$BUF" curl --protocol grpc --http2-prior-knowledge --data "$data" "$@"
}
"""


def walkthrough() -> str:
    """The commands of the document."""
    found = re.search(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found
    return found[1]


async def pauses(c: Coordinator) -> bool:
    """Whether the wish to pause is there."""
    try:
        return (await c.get("demo")).pause_at_step > 0
    except NotFoundError:
        return False


@pytest.mark.parametrize("tool", ["grpcurl", "buf"])
async def test_the_walkthrough_drives_a_whole_run(cluster: Cluster, tool: str) -> None:
    if tool == "grpcurl" and not shutil.which("grpcurl"):
        pytest.skip("grpcurl is not on PATH; the same commands run with buf curl")
    script = ("" if tool == "grpcurl" else BUF_AS_GRPCURL) + walkthrough()
    gate = cluster.reward.hold()
    async with coordinator(cluster) as c:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-euo",
            "pipefail",
            "-c",
            script.replace("sleep 1", "sleep 0.1"),
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(cluster.directory),
                "BUF": str(Path(sys.executable).with_name("buf")),
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
    assert len(re.findall('"(stepFinished|step_finished)"', text)) == run.step == 7
    assert re.search('"(addedCount|added_count)": 1', text)
