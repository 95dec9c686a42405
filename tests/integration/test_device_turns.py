"""Real services on fake GPUs: who holds which device, and that no two ever hold one at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollpacker.devices.fake import HISTORY, make_fake_gpus
from tests.integration.real_runs import Moment, proof_settings, running_stack, trained_draws
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(100)

PROMPTS = 16
SIZE = 300_000  # bytes of a device: room for the tiny model's engine or its trainer, not for both


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the fake GPUs are that the services of a test claim; two of them."""
    make_fake_gpus(tmp_path / "gpus", 2, SIZE)
    monkeypatch.setenv("ROLLPACKER_COORDINATOR_DEVICE_LEASE_SECONDS", "2")
    monkeypatch.setenv("ROLLPACKER_ROLLOUT_FAKE_DEVICES", str(tmp_path / "gpus"))
    yield tmp_path / "gpus"
    assert not [line for line in history(tmp_path / "gpus") if len(line["holders"]) > 1]


def history(gpus: Path) -> list[dict]:
    return [json.loads(line) for line in (gpus / HISTORY).read_text().splitlines()]


async def test_replicas_hold_devices_of_their_own_and_a_killed_one_gets_its_own_back(
    tmp_path: Path, gpus: Path
) -> None:
    write_model(tmp_path / "model")
    async with running_stack(tmp_path, rollouts=2) as real:
        run_id, values = "scaled", proof_settings(tmp_path, PROMPTS)
        await real.start(run_id, values)
        await real.reach(run_id, Moment(1, 0))
        before = await real.devices()
        assert sorted(before.values()) == ["rollout-0", "rollout-1"]
        await real.kill("rollout-0")
        await real.succeeded(run_id)
        async with asyncio.timeout(60):
            while await real.devices() != before:
                await asyncio.sleep(0.05)
        assert len(set(trained_draws(await real.trace(run_id)))) == PROMPTS
    assert {line["device"] for line in history(gpus)} == {"fake-0", "fake-1"}
