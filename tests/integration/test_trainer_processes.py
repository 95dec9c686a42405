"""The trainer as real processes: one, or several under torchrun on gloo; killed and restarted.

The processes find no coordinator and simply go on trying to register; these tests play its part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollpacker.devices.fake import HISTORY, make_fake_gpus
from rollpacker.devices.store import DeviceLeases
from rollpacker.rpc import client
from rollpacker.rpc.errors import NotFoundError
from rollpacker.rpc.server import RpcServer
from rollpacker.store import keys
from rollpacker.store.sample_stream import SampleStream
from rollpacker.v1 import trainer_service_pb2_grpc
from rollpacker.v1.coordinator_service_pb2_grpc import add_CoordinatorServiceServicer_to_server
from services.coordinator.device_server import DeviceServicer
from tests.integration import processes
from tests.trainer_support import (
    RUN,
    ServedTrainer,
    draws_of,
    fill_stream,
    make_groups,
    make_model,
    open_run_request,
    published_weights,
    same_bits,
    serving_trainer,
    trainer_settings,
    weighed,
)

pytestmark = pytest.mark.timeout(240)
# Makes a weight's change a smooth function of its gradient, g / (|g| + 1), so that comparing
# weights compares gradients.
SMOOTH = trainer_settings(
    learning_rate=0.05,
    adam_epsilon=1.0,
    max_grad_norm=1e9,
    normaliser="constant",
    normaliser_tokens=1,
)


@dataclass(frozen=True)
class TrainerProcess(ServedTrainer):
    """A running trainer."""

    process: subprocess.Popen[bytes] | None = None

    def end(self, number: int) -> None:
        """Send a signal to the process, or to torchrun."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill_rank(self, rank: int) -> None:
        """kill -9 one of torchrun's workers."""
        assert self.process is not None
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"RANK=%d" % rank in environment:
                os.kill(int(child), signal.SIGKILL)
                return
        raise AssertionError(f"no rank {rank}")

    async def ended(self) -> int:
        """The exit status, once there is one."""
        assert self.process is not None
        while self.process.poll() is None:
            await asyncio.sleep(0.02)
        return self.process.returncode


@contextlib.asynccontextmanager
async def trainer_process(
    redis_url: str, directory: Path, ranks: int = 1, shard_size: int = 0, **more: str
) -> AsyncIterator[TrainerProcess]:
    """Start a trainer, wait until it serves; at the end nothing of it is left. `more`: settings."""
    address_file = directory / "address"
    address_file.unlink(missing_ok=True)
    settings = {
        "WORKER_ID": "trainer-0",
        "COORDINATOR_ADDRESS": f"unix://{directory}/no-coordinator",
        "ADDRESS_FILE": str(address_file),
        "REDIS_URL": redis_url,
        "WEIGHTS_ROOT": str(directory / "weights"),
        "CHECKPOINT_ROOT": str(directory / "checkpoints"),
        "SHARD_SIZE": str(shard_size),
        **more,
    }
    environment = {f"ROLLPACKER_TRAINER_{name}": value for name, value in settings.items()}
    launcher = ["-m"]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher += ["-m"]
    log = directory / f"trainer-{ranks}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, "services.trainer"],
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not address_file.exists():
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.02)
        async with client.open_channel(address_file.read_text()) as channel:
            stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
            yield TrainerProcess(stub, process=process)
    finally:
        ranks = [pid for pid, _ in processes.descendants(process.pid)]  # torchrun's, in sessions
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def assert_same_change(initial: str, one: str, other: str) -> None:
    """Two published versions changed every weight of the initial one alike, within 1e-5."""
    before, ours, theirs = map(published_weights, (initial, one, other))
    assert before.keys() == ours.keys() == theirs.keys()
    for name, start in before.items():
        change = (ours[name] - start).double()
        difference = (theirs[name] - start).double() - change
        assert change.abs().max() > 0.01, name
        assert difference.abs().max() <= 1e-5 * change.abs().max(), name


def assert_same_metrics(ours, theirs) -> None:
    """Equal but for times, and for how the work was cut."""
    for name in ours:
        if not name.endswith("_seconds") and name not in ("micro_batches", "padding_share"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name


async def test_two_and_four_ranks_train_what_one_does_through_a_killed_rank(
    redis_client, redis_url, model, tmp_path
):
    """19 groups and then 3: more groups than ranks, and fewer; some have selection weight 0. Four
    ranks resume what two began."""
    request = open_run_request(model, SMOOTH)
    steps = [weighed(make_groups(0, 19)), weighed(make_groups(1, 3))]
    (tmp_path / "more").mkdir()
    empty = shutil.copytree(model, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    async with serving_trainer(redis_client, tmp_path / "one") as trainer:
        initial = (await trainer.open(request)).weights_uri
        alone = [await trainer.train(redis_client, n, groups) for n, groups in enumerate(steps)]
    await redis_client.flushdb()

    async with trainer_process(redis_url, tmp_path / "more", ranks=2) as trainer:
        await trainer.open(request)
        first = await trainer.train(redis_client, 0, steps[0])
        assert (await trainer.get()).world_size == 2
        await trainer.start(1)
        await fill_stream(redis_client, 1, steps[1])
        trainer.kill_rank(1)
        assert await trainer.ended() != 0
    assert_same_change(initial, alone[0].weights_uri, first.weights_uri)
    assert_same_metrics(alone[0].metrics, first.metrics)

    async with trainer_process(redis_url, tmp_path / "more", ranks=4) as trainer:
        with pytest.raises(NotFoundError):  # a refusal by all ranks; they live on
            await trainer.open(open_run_request(empty, SMOOTH, run_id="run-2"))
        opened = await trainer.open(request)
        assert (opened.weight_version, opened.run_snapshot_json) == (1, "after step 0")
        assert same_bits(opened.weights_uri, first.weights_uri)
        await trainer.start(1)
        second = await trainer.finish(1, draws_of(steps[1]))
        trainer.end(signal.SIGTERM)
        await trainer.ended()
    log = (tmp_path / "more" / "trainer-4.log").read_text()
    assert "Traceback" not in log.partition("death signal")[0]
    assert_same_change(initial, alone[1].weights_uri, second.weights_uri)
    assert_same_metrics(alone[1].metrics, second.metrics)


async def test_replicas_that_share_nothing_but_the_update_train_what_one_process_does(
    redis_client, redis_url, model, tmp_path
):
    """Two replicas of one rank go on where two replicas of two shards were killed."""
    settings = SMOOTH.model_copy(update={"deterministic": False, "dtype": "float64"})
    request = open_run_request(model, settings)
    steps = [make_groups(0, 35), make_groups(1, 3)]  # more than two windows, and one response each
    (tmp_path / "more").mkdir()
    async with serving_trainer(redis_client, tmp_path / "one") as trainer:
        initial = (await trainer.open(request)).weights_uri
        alone = [await trainer.train(redis_client, n, groups) for n, groups in enumerate(steps)]
    await redis_client.flushdb()

    async with trainer_process(redis_url, tmp_path / "more", ranks=4, shard_size=2) as trainer:
        await trainer.open(request)
        first = await trainer.train(redis_client, 0, steps[0])
        await trainer.start(1)
        await fill_stream(redis_client, 1, steps[1])
        trainer.kill_rank(3)
        assert await trainer.ended() != 0
    assert_same_change(initial, alone[0].weights_uri, first.weights_uri)
    assert_same_metrics(alone[0].metrics, first.metrics)

    async with trainer_process(redis_url, tmp_path / "more", ranks=2, shard_size=1) as trainer:
        opened = await trainer.open(request)
        assert (opened.weight_version, same_bits(opened.weights_uri, first.weights_uri)) == (
            1,
            True,
        )
        await trainer.start(1)
        second = await trainer.finish(1, draws_of(steps[1]))
        trainer.end(signal.SIGTERM)
        await trainer.ended()
    log = (tmp_path / "more" / "trainer-2.log").read_text()
    assert "Traceback" not in log.partition("death signal")[0]
    assert_same_change(initial, alone[1].weights_uri, second.weights_uri)
    assert_same_metrics(alone[1].metrics, second.metrics)


async def test_two_ranks_train_the_adapter_that_one_does(redis_client, redis_url, model, tmp_path):
    request = open_run_request(model, SMOOTH.model_copy(update={"lora_rank": 2}))
    steps = [make_groups(step, 5) for step in range(2)]
    (tmp_path / "more").mkdir()
    async with serving_trainer(redis_client, tmp_path / "one") as trainer:
        initial = published_weights((await trainer.open(request)).weights_uri)
        for step, groups in enumerate(steps):
            alone = await trainer.train(redis_client, step, groups)
    await redis_client.flushdb()
    async with trainer_process(redis_url, tmp_path / "more", ranks=2) as trainer:
        await trainer.open(request)
        for step, groups in enumerate(steps):
            together = await trainer.train(redis_client, step, groups)
    ours, theirs = map(published_weights, (alone.weights_uri, together.weights_uri))
    for name, start in initial.items():
        change = (ours[name] - start).abs().max()
        assert (change > 0) == name.endswith("_proj.weight"), name
        assert (theirs[name] - ours[name]).abs().max() <= 1e-4 * change, name


async def test_a_kill_between_checkpoint_and_record_loses_nothing(
    redis_client, redis_url, model, tmp_path
):
    """Redis takes no writes while FinishStep runs, so the kill comes before the record."""
    groups = make_groups(0)
    async with trainer_process(redis_url, tmp_path) as trainer:
        await trainer.open(open_run_request(model))
        await trainer.start(0)
        await fill_stream(redis_client, 0, groups)
        await redis_client.execute_command("CLIENT", "PAUSE", "60000", "WRITE")
        finishing = asyncio.create_task(trainer.finish(0, draws_of(groups)))
        published = tmp_path / "weights" / RUN / "step_000001"
        saved = tmp_path / "checkpoints" / RUN / "step_000001" / "COMPLETE"
        while not (published.exists() and saved.exists()):
            await asyncio.sleep(0.01)
        trainer.end(signal.SIGKILL)
        await trainer.ended()
        await asyncio.gather(finishing, return_exceptions=True)
    await redis_client.execute_command("CLIENT", "UNPAUSE")
    stream = SampleStream(redis_client, RUN, 0)
    assert await stream.result() is None
    before = published_weights(published.as_uri())

    async with trainer_process(redis_url, tmp_path) as trainer:
        opened = await trainer.open(open_run_request(model))
        assert (opened.weight_version, opened.run_snapshot_json) == (1, "after step 0")
        recorded = await stream.result()
        assert recorded is not None
        assert list(recorded.draws) == draws_of(groups)
        assert await trainer.finish(0, draws_of(groups)) == recorded
        after = published_weights(opened.weights_uri)
        assert all((before[name] == after[name]).all() for name in before)
        await redis_client.delete(keys.step_samples(RUN, 0))
        assert (await trainer.train(redis_client, 1, make_groups(1))).weight_version == 2
        trainer.end(signal.SIGTERM)
        assert await trainer.ended() == 0


class Devices(DeviceServicer):
    """The part of a coordinator that lends devices."""

    def __init__(self, leases: DeviceLeases) -> None:
        self._devices = leases


async def test_ranks_hold_a_device_each_while_a_step_is_open(
    model, redis_url, redis_client, tmp_path
):
    gpus, leases = tmp_path / "gpus", DeviceLeases(redis_client, 30)
    make_fake_gpus(gpus, 2, 10_000_000)
    server = RpcServer(
        "127.0.0.1:0", [], lambda to: add_CoordinatorServiceServicer_to_server(Devices(leases), to)
    )
    await server.start()
    settings = {"FAKE_DEVICES": str(gpus), "COORDINATOR_ADDRESS": server.address}
    async with trainer_process(redis_url, tmp_path, 2, **settings) as trainer:
        await trainer.open(open_run_request(model, trainer_settings(offload=True)))
        assert (await leases.load()).leases == {}
        await trainer.start(0)
        assert list((await leases.load()).leases) == ["fake-0", "fake-1"]
        await fill_stream(redis_client, 0, make_groups(0))
        await trainer.finish(0, draws_of(make_groups(0)))
        assert (await leases.load()).leases == {}
    lines = [json.loads(line) for line in (gpus / HISTORY).read_text().splitlines()]
    for name in ("fake-0", "fake-1"):
        of_one = [line for line in lines if line["device"] == name]
        assert len({line["process"] for line in of_one}) == 1, "each rank has its own"
        is_held = [line["bytes"] > 0 for line in of_one]
        assert is_held == [True, False, True, False], "while the run is opened, and in the step"
    await server.stop()
