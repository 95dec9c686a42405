"""Real services on fake GPUs: who holds which device, and that no two ever hold one at once.

A fake GPU has room for the engine of the tiny model or for its trainer, not for both; its history
tells who held it when.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from rollpacker.devices.fake import HISTORY, make_fake_gpus
from tests.integration.real_runs import (
    OUTCOME,
    Moment,
    RealStack,
    proof_settings,
    running_stack,
    trained_draws,
)
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(600)

PROMPTS = 16  # one step more than is disturbed: the run does not end before it is looked at
SIZE = 300_000  # bytes of a device
# No token stops, and a replica decodes one response after the other: most of a step is rollout.
SAMPLING = {"max_response_tokens": 120, "stop_token_ids": [999]}
SLOTS = 1
REPLICAS = {"rollout-0", "rollout-1"}


@asynccontextmanager
async def stack_on_gpus(directory: Path, count: int) -> AsyncIterator[RealStack]:
    """Two replicas and a trainer that claim fake GPUs, `count` in all."""
    gpus = directory / "gpus"
    make_fake_gpus(gpus, count, SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLPACKER_COORDINATOR_DEVICE_LEASE_SECONDS", "2")
        for service in ("ROLLOUT", "TRAINER"):
            patch.setenv(f"ROLLPACKER_{service}_FAKE_DEVICES", str(gpus))
        async with running_stack(directory, slots=SLOTS, rollouts=2) as real:
            yield real
    assert all(len(line["holders"]) <= 1 for line in history(directory))


def history(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "gpus" / HISTORY).read_text().splitlines()]


async def all_devices_decode(real: RealStack, step: int) -> None:
    """Begin a step, whose round lasts until engines hold all devices; then let it end."""
    await real.paused_at("r", step)
    await real.pause("reward-0")
    await real.go_on_until("r", step + 1)
    while True:
        last = {line["device"]: line for line in history(real.directory)}
        holders = {int(line["process"].split("-")[0]) for line in last.values() if line["bytes"]}
        if holders == {await real.pid(name) for name in REPLICAS}:
            break
        real.stack.supervisor.check()
        await asyncio.sleep(0.02)
    await real.go_on("reward-0")


async def test_placements_train_the_same_over_kills_and_no_device_has_two_holders(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model")
    values = proof_settings(tmp_path, PROMPTS, sampling=SAMPLING)

    async with stack_on_gpus(tmp_path / "separate", 3) as real:
        await real.start("r", values, held=True)
        await real.reach("r", Moment(1, 0))
        held = await real.devices()
        assert sorted(held.values()) == [*sorted(REPLICAS), "trainer-0"]
        await real.kill("rollout-0")
        await real.succeeded("r")
        assert await real.devices() == held, "the killed one's is its own still"
        expected = await real.trace("r")
    assert len(set(trained_draws(expected))) == PROMPTS

    async with stack_on_gpus(tmp_path / "colocated", 2) as real:
        await real.pause("reward-0")  # the first round lasts until it goes on
        await real.start("r", values | {"placement": "colocated"})
        while set((await real.devices()).values()) != REPLICAS:
            real.stack.supervisor.check()
        await real.kill("rollout-0")  # amid a round, with its device
        await real.go_on_until("r", 1)
        await real.go_on("reward-0")
        await all_devices_decode(real, 1)  # so the update must take one from an engine
        await real.reach("r", Moment(1, OUTCOME))
        await real.kill("trainer-0")  # with its device, or just before
        await all_devices_decode(real, 2)  # so an engine has it back
        await real.reach("r", Moment(2, 1))
        await real.kill("coordinator")
        await real.succeeded("r")
        trace = await real.trace("r")
    assert trace.schedule == expected.schedule
    assert trace.responses == expected.responses
    lines = [line for line in history(tmp_path / "colocated") if line["bytes"]]
    turns = sum(  # a trainer that was started again may take the other device
        one["process"] != other["process"]
        for device in ("fake-0", "fake-1")
        for one, other in pairwise(line for line in lines if line["device"] == device)
    )
    assert turns >= 3, "an update took a device, an engine had it back, an update took one again"
