"""When a trainer holds the devices that it claims: over real loopback gRPC, with a fake holder."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio

from rollpacker.devices.holder import NoDevices
from rollpacker.rpc.errors import NotFoundError, UnavailableError
from tests.trainer_support import (
    draws_of,
    fill_stream,
    make_groups,
    make_model,
    open_run_request,
    serving_trainer,
    trainer_settings,
)

pytestmark = pytest.mark.timeout(240)


class OneDevice(NoDevices):
    """Given and taken without anybody to ask; may be busy, or not to be given back, for a while."""

    def __init__(self) -> None:
        self.busy = 0  # claims that fail
        self.stuck = 0  # releases that do
        self.claims = 0

    async def claim(self, count: int) -> tuple[str, ...]:
        assert count == 1
        if self.busy:
            self.busy -= 1
            raise UnavailableError("DEVICES_BUSY", "an engine has it")
        self.claims += not self.held
        self.held = ("gpu",)
        return self.held

    async def release(self) -> int:
        if self.stuck:
            self.stuck -= 1
            raise UnavailableError("DEVICES_HELD", "its memory is not free")
        self.held = ()
        return 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


async def test_with_offload_devices_are_held_while_a_step_is_open_only(
    model: Path, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    device, groups = OneDevice(), make_groups(0)
    async with serving_trainer(redis_client, tmp_path, device) as trainer:
        request = open_run_request(model, trainer_settings(offload=True))
        await trainer.open(request)
        assert (device.claims, device.held) == (1, ())
        device.busy = 1
        with pytest.raises(UnavailableError) as busy:
            await trainer.start(0)
        assert busy.value.reason == "DEVICES_BUSY"
        await trainer.start(0)
        assert device.held
        await trainer.abandon(0)
        assert not device.held
        await trainer.start(0)
        await trainer.open(request)  # of a coordinator that came back: the step is dropped
        assert not device.held
        await trainer.start(0)
        await fill_stream(redis_client, 0, groups)
        device.stuck = 1
        with pytest.raises(UnavailableError) as stuck:
            await trainer.finish(0, draws_of(groups))
        assert stuck.value.reason == "DEVICES_HELD"
        assert (await trainer.finish(0, draws_of(groups))).weight_version == 1
        assert not device.held


async def test_a_checkpoint_between_steps_needs_no_device(
    model: Path, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    """Of a run that is paused while the engines have them, too."""
    request = open_run_request(model, trainer_settings(offload=True, checkpoint_interval=100))
    device = OneDevice()
    async with serving_trainer(redis_client, tmp_path, device) as trainer:
        await trainer.open(request)
        await trainer.train(redis_client, 0, make_groups(0))
        device.busy = 1
        assert await trainer.save_checkpoint() == 1
        assert (device.busy, device.held) == (1, ())
    async with serving_trainer(redis_client, tmp_path, OneDevice()) as trainer:
        assert (await trainer.open(request)).weight_version == 1


async def test_without_offload_devices_are_held_from_the_first_run_on(
    model: Path, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    device = OneDevice()
    async with serving_trainer(redis_client, tmp_path, device) as trainer:
        assert not device.held
        await trainer.open(open_run_request(model))
        await trainer.train(redis_client, 0, make_groups(0))
        assert (device.claims, device.held) == (1, ("gpu",))


async def test_a_run_that_cannot_be_opened_leaves_no_device_held(
    redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    device = OneDevice()
    async with serving_trainer(redis_client, tmp_path, device) as trainer:
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotFoundError):
            await trainer.open(open_run_request(tmp_path / "empty"))
        assert (device.claims, device.held) == (1, ())
