"""Each of the four services answers /metrics and writes JSON logs, as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rollpacker.local_stack.ports import free_port

OWN = {  # a figure that only this service has
    "coordinator": "rollpacker_coordinator_leads 1.0",
    "reward": "rollpacker_reward_slots 1.0",
    "rollout": "rollpacker_engine_weight_version -1.0",
    "trainer": 'rollpacker_trainer_activity{activity="idle"} 1.0',
}


def environment(service: str, redis_url: str, directory: Path, address: str) -> dict[str, str]:
    values = {"ADDRESS": "127.0.0.1:0", "METRICS_ADDRESS": address, "LOG_FORMAT": "json"}
    if service in ("coordinator", "trainer"):
        values["REDIS_URL"] = redis_url
    if service == "reward":
        values["SLOTS"] = "1"
    if service != "coordinator":  # none is there: they wait for it, and answer
        values |= {"WORKER_ID": f"{service}-0", "COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}"}
    if service in ("rollout", "trainer"):
        values["WEIGHTS_ROOT"] = str(directory)
    if service == "trainer":
        values["CHECKPOINT_ROOT"] = str(directory)
    return {f"ROLLPACKER_{service.upper()}_{name}": value for name, value in values.items()}


async def scrape(address: str, process: asyncio.subprocess.Process) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    async with asyncio.timeout(120):
        while process.returncode is None:
            try:
                return await asyncio.to_thread(get)
            except urllib.error.URLError:
                await asyncio.sleep(0.2)
    raise AssertionError(f"the service ended with {process.returncode}")


@pytest.mark.parametrize("service", OWN)
async def test_the_service_shows_its_figures_and_logs_json(
    service: str, redis_url: str, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    values = environment(service, redis_url, tmp_path, address)
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{service}"), env=os.environ | values, stderr=log
        )
        try:
            page = await scrape(address, process)
        finally:
            process.kill()
            await process.wait()
    assert OWN[service] in page.splitlines()
    assert "process_resident_memory_bytes" in page
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {line["service"] for line in lines} == {service}
    assert any(f"metrics on http://{address}/metrics" in line["message"] for line in lines)
