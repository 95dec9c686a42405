"""Device leases between real processes, on fake GPUs and a real Redis (device_owner.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollpacker.devices.fake import make_fake_gpus
from tests.integration import processes
from tests.integration.device_owner import TOTAL

LONG, SHORT = 600.0, 0.3  # seconds of a lease: never over within a test, or soon
Start = Callable[..., Awaitable["Owner"]]


class Owner:
    """One such process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, words: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(words.encode() + b"\n")
        line = await self.process.stdout.readline()
        return dict(json.loads(line))

    async def until_granted(self, words: str) -> dict[str, Any]:
        while "error" in (answer := await self.ask(words)):
            assert answer["error"] == "DevicesBusyError", answer
        return answer

    async def granted(self, words: str) -> dict[str, Any]:
        answer = await self.ask(words)
        assert "error" not in answer, answer
        return answer

    async def refused(self, words: str, error: str, said: str = "") -> None:
        answer = await self.ask(words)
        assert answer.get("error") == error, answer
        assert said in answer["said"]


@pytest.fixture
async def start(redis_url: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an owner: its name, seconds of its lease; the first one says how many devices."""
    owners: list[Owner] = []

    async def start(name: str, seconds: float = LONG, devices: int = 1) -> Owner:
        if not owners:
            make_fake_gpus(tmp_path / "gpus", devices, TOTAL)
        arguments = (redis_url, str(tmp_path / "gpus"), name, str(seconds))
        owner = Owner(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.integration.device_owner", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )
        )  # fmt: skip
        owners.append(owner)
        return owner

    yield start
    for owner in owners:
        if owner.process.returncode is None:
            owner.process.kill()
        await owner.process.wait()


async def test_replicas_that_start_at_once_get_distinct_devices(start: Start) -> None:
    owners = [await start(f"rollout-{index}", devices=3) for index in range(4)]
    answers = await asyncio.gather(*(owner.ask("claim 1 800") for owner in owners))
    given = [answer for answer in answers if "error" not in answer]
    assert sorted(device for answer in given for device in answer["devices"]) == [
        "fake-0",
        "fake-1",
        "fake-2",
    ]
    assert len({answer["fence"] for answer in given}) == 3
    (refused,) = [answer for answer in answers if "error" in answer]
    assert refused["error"] == "DevicesBusyError"


async def test_the_trainer_wakes_when_the_engine_s_memory_is_measured_to_be_free(
    start: Start,
) -> None:
    engine, trainer = await start("rollout-0"), await start("trainer-0")
    first = await engine.granted("claim 1 900")
    await engine.granted("use 900")
    await trainer.refused("claim 1 800", "DevicesBusyError", "held by rollout-0")
    await engine.granted("use 300")
    await engine.refused("release", "MemoryNotFreedError", "fake-0: 300 bytes")
    waiting = asyncio.create_task(trainer.until_granted("claim 1 800"))
    await engine.granted("use 0")
    assert not waiting.done()  # its memory is free, and it has not said so
    await engine.granted("release")
    second = await waiting
    assert second["fence"] > first["fence"]
    await engine.refused("claim 1 900", "DevicesBusyError", "held by trainer-0")


async def test_the_device_of_a_killed_owner_goes_to_the_next_one(start: Start) -> None:
    dead, heir = await start("rollout-0", SHORT), await start("rollout-1")
    first = await dead.granted("claim 1 900")
    await dead.granted("use 900")
    dead.process.kill()
    await dead.process.wait()
    second = await heir.until_granted("claim 1 900")
    assert second["fence"] > first["fence"]


async def test_a_paused_owner_keeps_its_device_with_its_memory_and_a_late_one_loses_it(
    start: Start,
) -> None:
    """Lapsed is not free: what counts is the memory. Once that is gone, so is the device."""
    paused, other = await start("rollout-0", SHORT), await start("trainer-0")
    await paused.granted("claim 1 900")
    await paused.granted("use 900")
    os.kill(paused.process.pid, signal.SIGSTOP)
    while processes.state(paused.process.pid) != processes.STOPPED:
        await asyncio.sleep(0.01)
    while ", fence" in (busy := await other.ask("claim 1 800"))["said"]:
        pass  # until the lease has lapsed
    assert busy["said"].endswith(f"{TOTAL - 900} bytes free of 800 needed, last held by rollout-0")
    os.kill(paused.process.pid, signal.SIGCONT)
    await paused.granted("use 0")
    await other.until_granted("claim 1 800")
    for late in ("release", "renew"):
        await paused.refused(late, "StaleLeaseError", "does not hold fake-0 any more")
