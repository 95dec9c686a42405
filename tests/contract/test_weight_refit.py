"""Weights from a trainer's host to a rollout host, over real loopback channels."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollpacker.refit import sender
from rollpacker.refit.broadcast import Broadcaster
from rollpacker.refit.manifest import MANIFEST, Manifest, ManifestError, version_directory
from rollpacker.refit.receiver import Receiver
from rollpacker.refit.sender import WeightsServicer
from rollpacker.rpc import client, errors
from rollpacker.rpc.server import RpcServer
from rollpacker.types import EngineSpec
from rollpacker.v1 import weights_service_pb2 as pb
from rollpacker.v1 import weights_service_pb2_grpc
from services.rollout.torch_engine import TorchEngine
from services.rollout.weights_location import WeightsSource
from tests.engine_contract import Subject, essence, seeded
from tests.tiny_models import save_model

HOST = "127.0.0.1"


def published(directory: Path, version: int) -> Path:
    manifest = Manifest.of_directory(directory, version)
    (directory / MANIFEST).write_bytes(manifest.to_json())
    return directory


def big(root: Path, version: int, seed: int = 0, run_id: str = "run") -> Path:
    """A version of some MiB."""
    directory = version_directory(root, run_id, version)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    save_file({"weight": torch.randn(1400, 1000)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    (directory / "empty").touch()
    return published(directory, version)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class FaultySender(WeightsServicer):
    """A sender whose disk or network can be made to fail."""

    def __init__(self, root: Path, broadcaster: Broadcaster | None = None) -> None:
        super().__init__(root, broadcaster)
        self.offsets: list[int] = []  # asked for, of the big file
        self.pause_after = 0  # pieces; then nothing comes any more
        self.damaged = 0  # calls to damage
        self.paused, self.left = asyncio.Event(), asyncio.Event()

    async def ReadFile(self, request, context) -> AsyncIterator[pb.ReadFileResponse]:
        pieces = 0
        async for message in super().ReadFile(request, context):
            if request.file_name != "model.safetensors":
                yield message
                continue
            if not pieces:
                self.offsets.append(message.offset)
                if self.damaged:
                    self.damaged -= 1
                    message.data = b"X" + message.data[1:]
            yield message
            pieces += 1
            if pieces == self.pause_after:
                self.paused.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.left.set()


@contextlib.asynccontextmanager
async def serving(servicer: WeightsServicer):
    server = RpcServer(
        f"{HOST}:0",
        [sender.SERVICE_NAME],
        lambda grpc: weights_service_pb2_grpc.add_WeightsServiceServicer_to_server(servicer, grpc),
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


def receiver(root: Path, **changes) -> Receiver:
    return Receiver(root, **{"seconds": 60, **changes})


async def test_a_stream_brings_the_whole_version(tmp_path):
    there = big(tmp_path / "there", 3)
    async with serving(WeightsServicer(tmp_path / "there")) as address:
        here = await receiver(tmp_path / "here").receive(address, "run", 3)
    assert here == version_directory(tmp_path / "here", "run", 3)
    assert contents(here) == contents(there)


async def test_a_broadcast_brings_it_to_all_at_once(tmp_path, caplog):
    there = big(tmp_path / "there", 3)
    servicer = FaultySender(tmp_path / "there", Broadcaster(HOST, 60, gather_seconds=1))
    async with serving(servicer) as address:
        found = await asyncio.gather(
            *(
                receiver(tmp_path / name, broadcast_host=HOST).receive(address, "run", 3)
                for name in ("a", "b", "c")
            )
        )
    assert all(contents(here) == contents(there) for here in found)
    assert "no broadcast" not in caplog.text
    assert not servicer.offsets, "nothing was streamed"


async def test_a_broadcast_that_a_member_leaves_ends_and_the_stream_is_the_way_on(tmp_path, caplog):
    there = big(tmp_path / "there", 0)
    servicer = FaultySender(tmp_path / "there", Broadcaster(HOST, 2, gather_seconds=3))
    async with serving(servicer) as address, client.open_channel(address) as channel:
        stub = weights_service_pb2_grpc.WeightsServiceStub(channel)
        request = pb.JoinBroadcastRequest(run_id="run", weight_version=0)
        deserter = asyncio.ensure_future(client.call(lambda: stub.JoinBroadcast(request)))
        here = await receiver(tmp_path / "here", broadcast_host=HOST).receive(address, "run", 0)
        assert (await deserter).world_size == 3
    assert contents(here) == contents(there)
    assert "no broadcast" in caplog.text
    assert servicer.offsets == [0]


async def test_a_receiver_that_is_killed_leaves_the_old_version_and_then_goes_on(tmp_path):
    big(tmp_path / "there", 0)
    newer = big(tmp_path / "there", 1, seed=1)
    servicer = FaultySender(tmp_path / "there")
    here = tmp_path / "here"
    async with serving(servicer) as address:
        old = await receiver(here).receive(address, "run", 0)
        before = contents(old)
        servicer.pause_after = 3
        program = (
            "import asyncio, pathlib, sys\n"
            "from rollpacker.refit.receiver import Receiver\n"
            "receiver = Receiver(pathlib.Path(sys.argv[1]), seconds=300)\n"
            "asyncio.run(receiver.receive(sys.argv[2], 'run', 1))\n"
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(here), address
        )
        await asyncio.wait_for(servicer.paused.wait(), 120)
        partial = here / "run" / ".partial-step_000001" / "model.safetensors"
        while not (partial.exists() and partial.stat().st_size):
            await asyncio.sleep(0.02)
        child.kill()
        await child.wait()
        assert contents(old) == before
        assert not version_directory(here, "run", 1).exists()
        servicer.pause_after = 0
        found = await receiver(here).receive(address, "run", 1)
    assert contents(found) == contents(newer)
    assert servicer.offsets[-1] > 0, "it went on from what was there"


async def test_a_stalled_stream_fails_at_its_deadline_on_both_sides(tmp_path):
    big(tmp_path / "there", 0)
    servicer = FaultySender(tmp_path / "there")
    servicer.pause_after = 1
    async with serving(servicer) as address:
        with pytest.raises(errors.DeadlineExceededError):
            await receiver(tmp_path / "here", seconds=3).receive(address, "run", 0)
        await asyncio.wait_for(servicer.left.wait(), 60)
    assert not version_directory(tmp_path / "here", "run", 0).exists()


async def test_a_sender_that_goes_away_leaves_what_has_come(tmp_path):
    there = big(tmp_path / "there", 0)
    servicer = FaultySender(tmp_path / "there")
    servicer.pause_after = 2
    async with serving(servicer) as address:
        first = asyncio.ensure_future(receiver(tmp_path / "here").receive(address, "run", 0))
        await asyncio.wait_for(servicer.paused.wait(), 60)
    with pytest.raises(errors.UnavailableError):
        await first
    servicer.pause_after = 0
    async with serving(servicer) as address:
        here = await receiver(tmp_path / "here").receive(address, "run", 0)
    assert contents(here) == contents(there)
    assert len(servicer.offsets) == 2


async def test_damage_on_the_way_is_mended_once_and_then_told(tmp_path):
    there = big(tmp_path / "there", 0)
    servicer = FaultySender(tmp_path / "there")
    async with serving(servicer) as address:
        servicer.damaged = 2
        with pytest.raises(errors.DataLossError, match="arrived damaged"):
            await receiver(tmp_path / "here").receive(address, "run", 0)
        assert not version_directory(tmp_path / "here", "run", 0).exists()
        servicer.damaged = 1
        here = await receiver(tmp_path / "here").receive(address, "run", 0)
    assert contents(here) == contents(there)


async def test_a_damaged_disk_of_the_sender_is_found_out(tmp_path):
    there = big(tmp_path / "there", 0)
    with (there / "model.safetensors").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"damage")
    async with serving(WeightsServicer(tmp_path / "there")) as address:
        with pytest.raises(errors.DataLossError, match="another SHA-256"):
            await receiver(tmp_path / "here").receive(address, "run", 0)
    assert not version_directory(tmp_path / "here", "run", 0).exists()


async def test_a_version_that_was_published_again_is_received_anew(tmp_path):
    big(tmp_path / "there", 0)
    async with serving(WeightsServicer(tmp_path / "there")) as address:
        receives = receiver(tmp_path / "here")
        first = contents(await receives.receive(address, "run", 0))
        there = big(tmp_path / "there", 0, seed=9)
        again = contents(await receives.receive(address, "run", 0))
    assert first != again == contents(there)


async def test_two_versions_of_the_present_run_stay_and_none_of_another(tmp_path):
    received = [("before", 7), ("run", 0), ("run", 1), ("run", 2)]
    for run_id, version in received:
        big(tmp_path / "there", version, run_id=run_id)
    here = tmp_path / "here"
    async with serving(WeightsServicer(tmp_path / "there")) as address:
        for run_id, version in received:
            await receiver(here).receive(address, run_id, version)
    kept = [path.relative_to(here).as_posix() for path in sorted(here.glob("*/*"))]
    assert kept == ["run/step_000001", "run/step_000002"]
    assert [path.name for path in here.iterdir()] == ["run"]


async def test_what_is_not_there_is_refused_by_name(tmp_path):
    big(tmp_path / "there", 0)
    async with (
        serving(WeightsServicer(tmp_path / "there")) as address,
        client.open_channel(address) as channel,
    ):
        stub = weights_service_pb2_grpc.WeightsServiceStub(channel)

        async def read(**changes: object) -> None:
            names = {"run_id": "run", "file_name": "config.json", **changes}
            request = pb.ReadFileRequest(**names)
            async for _ in client.stream(lambda: stub.ReadFile(request, timeout=30)):
                pass

        with pytest.raises(errors.NotFoundError, match="version 1 of run run is not published"):
            await read(weight_version=1)
        with pytest.raises(errors.InvalidArgumentError, match="run_id"):
            await read(run_id="../there/run")
        with pytest.raises(errors.InvalidArgumentError, match="file_name"):
            await read(file_name="../../secret")
        with pytest.raises(errors.OutOfRangeError):
            await read(offset=3)
        join = pb.JoinBroadcastRequest(run_id="run")
        with pytest.raises(errors.FailedPreconditionError, match="broadcast_host"):
            await client.call(lambda: stub.JoinBroadcast(join, timeout=30))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ".partial", MANIFEST])
def test_a_manifest_that_leads_out_of_its_directory_is_none(name):
    text = (
        Manifest(0, {}, {})
        .to_json()
        .replace(b'"files": {}', b'"files": {"%s": {"bytes": 1, "sha256": ""}}' % name.encode())
    )
    with pytest.raises(ManifestError, match="cannot be a file"):
        Manifest.from_json(text)


@pytest.mark.parametrize("way", ["file", "stream", "broadcast"])
async def test_an_engine_serves_the_same_whatever_carried_its_weights(tmp_path, way):
    there = published(save_model(version_directory(tmp_path / "there", "run", 4)), 4)
    servicer = WeightsServicer(tmp_path / "there", Broadcaster(HOST, 60, gather_seconds=0))
    spec = EngineSpec("run", 4, there.as_uri())
    root = tmp_path / ("there" if way == "file" else "here")
    if way != "file":  # the uri of a host that this one cannot see
        spec = EngineSpec("run", 4, "file:///elsewhere/run/step_000004")
    host = HOST if way == "broadcast" else ""
    source = WeightsSource(root, receiver(root / "received", broadcast_host=host))
    async with serving(servicer) as address:
        if way != "file":
            spec = EngineSpec("run", 4, spec.weights_uri, weights_address=address)
        directory = await source.directory(spec)
    found = []
    for each in (there, directory):
        engine = TorchEngine(dtype="float64")
        try:
            await engine.load_weights(each)
            results = await Subject(engine, each, each).run(seeded(4))
        finally:
            await engine.close()
        found.append({name: essence(result) for name, result in results.items()})
    assert found[0] == found[1]


async def test_a_directory_that_is_not_what_its_manifest_says_is_never_loaded(tmp_path):
    there = published(save_model(tmp_path / "v2"), 2)
    source = WeightsSource(tmp_path)
    assert await source.directory(EngineSpec("run", 2, there.as_uri())) == there
    with pytest.raises(errors.InvalidArgumentError, match="holds weight version 2, not the 3"):
        await source.directory(EngineSpec("run", 3, there.as_uri()))
    weights = there / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(errors.DataLossError, match="its manifest says"):
        await source.directory(EngineSpec("run", 2, there.as_uri()))
