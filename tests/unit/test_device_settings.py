"""Which workers claim GPUs, by their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollpacker.devices.fake import FakeMeter
from rollpacker.devices.memory import NvidiaMeter
from services.reward.settings import RewardServiceSettings
from services.rollout.settings import RolloutServiceSettings
from services.trainer.settings import TrainerServiceSettings

WORKER = {"worker_id": "w", "coordinator_address": "127.0.0.1:1"}
ROOTS = {"weights_root": Path("w"), "checkpoint_root": Path("c"), "redis_url": "redis://x"}


def rollout(**values: Any) -> RolloutServiceSettings:
    return RolloutServiceSettings(**WORKER, weights_root=Path("w"), **values)


def trainer(**values: Any) -> TrainerServiceSettings:
    return TrainerServiceSettings(**WORKER, **ROOTS, **values)


def reward(**values: Any) -> RewardServiceSettings:
    return RewardServiceSettings(**WORKER, **values)


@pytest.mark.parametrize(
    "settings",
    [
        rollout(),
        rollout(device="cuda:1"),
        rollout(device="cuda", device_leases=False),
        rollout(device="cuda", engine="sglang", sglang_url="http://127.0.0.1:1"),
        trainer(),
        trainer(device="cuda", device_leases=False),
        reward(judge_device="cuda"),
        reward(judge_device="cuda:0", judge_backend="transformers"),
    ],
)
def test_these_claim_nothing(settings: Any) -> None:
    assert settings.meter() is None


@pytest.mark.parametrize(
    "settings",
    [
        rollout(device="cuda"),
        trainer(device="cuda"),
        reward(judge_device="cuda", judge_backend="transformers"),
    ],
)
def test_these_claim_gpus(settings: Any) -> None:
    assert isinstance(settings.meter(), NvidiaMeter)


def test_on_a_cpu_fake_gpus_are_claimed(tmp_path: Path) -> None:
    assert isinstance(rollout(fake_devices=tmp_path).meter(), FakeMeter)


def test_a_trainer_over_several_hosts_is_told_to_claim_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        ValueError, match=r"8 of 16 ranks .* ROLLPACKER_TRAINER_DEVICE_LEASES=false"
    ):
        trainer(device="cuda").meter()
    assert trainer(device="cuda", device_leases=False).meter() is None


def test_a_judge_that_names_its_memory_is_a_guest() -> None:
    assert reward(judge_memory_gib=2).judge_guest_bytes == 2 << 30
    assert reward().judge_guest_bytes == 0
