"""Devices over real gRPC: what the coordinator promises, and workers that claim and give back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollpacker.devices import holder
from rollpacker.devices.fake import FakeMeter, make_fake_gpus
from rollpacker.devices.holder import DeviceLeaseLostError, LeasedDevices
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from rollpacker.tasks import end_tasks
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract.coordinator_cluster import (  # noqa: F401  a fixture
    Cluster,
    Coordinator,
    cluster,
    coordinator,
)

GIB = 1 << 30


@pytest.fixture
async def server(cluster: Cluster) -> AsyncIterator[Coordinator]:  # noqa: F811
    async with coordinator(cluster, register=False) as c:
        yield c


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    make_fake_gpus(tmp_path / "gpus", 2, 100)
    return tmp_path / "gpus"


def worker(
    server: Coordinator, gpus: Path, name: str, *, bound: bool = False, wanted: str = ""
) -> LeasedDevices:
    meter = FakeMeter(gpus, [wanted] if wanted else [])
    return LeasedDevices(server.address, name, meter, 0.8, bound=bound)


async def claim(server: Coordinator, name: str, count: int = 1, **free: int) -> pb.DeviceGrant:
    request = pb.ClaimDevicesRequest(
        worker_id=name,
        count=count,
        needed_bytes=GIB,
        memory=[pb.DeviceMemory(device=device, free_bytes=size) for device, size in free.items()],
    )
    return (await call(lambda: server.stub.ClaimDevices(request, timeout=10))).grant


async def listed(server: Coordinator) -> dict[str, str]:
    answer = await call(lambda: server.stub.ListDevices(pb.ListDevicesRequest(), timeout=10))
    return {lease.device: lease.worker_id for lease in answer.leases}


async def test_a_device_has_one_holder_until_it_is_given_back(server: Coordinator) -> None:
    grant = await claim(server, "rollout-0", a=GIB, b=GIB - 1)
    assert list(grant.devices) == ["a"]
    assert await listed(server) == {"a": "rollout-0"}
    with pytest.raises(ResourceExhaustedError, match="a: held by rollout-0, fence 1") as busy:
        await claim(server, "trainer-0", a=GIB)
    assert (busy.value.reason, busy.value.retry_after_seconds) == ("DEVICES_BUSY", 0.5)
    request = pb.ReleaseDevicesRequest(grant=grant, memory=[pb.DeviceMemory(device="a")])
    with pytest.raises(FailedPreconditionError) as not_freed:
        await call(lambda: server.stub.ReleaseDevices(request, timeout=10))
    assert not_freed.value.reason == "MEMORY_NOT_FREED"
    request.memory[0].free_bytes = GIB
    await call(lambda: server.stub.ReleaseDevices(request, timeout=10))
    assert await listed(server) == {}
    for late in (
        lambda: server.stub.ReleaseDevices(request, timeout=10),
        lambda: server.stub.RenewDevices(pb.RenewDevicesRequest(grant=grant), timeout=10),
    ):
        with pytest.raises(FailedPreconditionError) as stale:
            await call(late)
        assert stale.value.reason == "STALE_LEASE"


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("ClaimDevices", pb.ClaimDevicesRequest(count=1), "worker_id"),
        ("ClaimDevices", pb.ClaimDevicesRequest(worker_id="w"), "count"),
        (
            "ClaimDevices",
            pb.ClaimDevicesRequest(worker_id="w", count=1, needed_bytes=-1),
            "needed_bytes",
        ),
        (
            "ClaimDevices",
            pb.ClaimDevicesRequest(worker_id="w", count=1, memory=[pb.DeviceMemory()]),
            "memory.device",
        ),
        ("RenewDevices", pb.RenewDevicesRequest(), "grant.devices"),
        (
            "ReleaseDevices",
            pb.ReleaseDevicesRequest(grant=pb.DeviceGrant(worker_id="w", devices=["a"])),
            "memory",
        ),
    ],
)
async def test_a_wrong_request_names_its_field(
    server: Coordinator, method: str, request_: object, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as wrong:
        await call(lambda: getattr(server.stub, method)(request_, timeout=10))
    assert wrong.value.violations[0][0] == field


async def test_workers_that_claim_at_once_get_devices_of_their_own(
    server: Coordinator, gpus: Path
) -> None:
    first, second = worker(server, gpus, "rollout-0"), worker(server, gpus, "rollout-1")
    given = await asyncio.gather(first.claim(1), second.claim(1))
    assert sorted(given) == [("fake-0",), ("fake-1",)]
    assert await listed(server) == {given[0][0]: "rollout-0", given[1][0]: "rollout-1"}
    for each in (first, second):
        await each.leave()
    assert await listed(server) == {}


async def test_of_devices_of_two_sizes_each_must_have_its_own_share_free(
    server: Coordinator, gpus: Path
) -> None:
    (gpus / "devices.json").write_text(json.dumps({"fake-0": 1000, "fake-1": 100}))
    neighbour = FakeMeter(gpus)
    neighbour.keep_to(["fake-0"])
    neighbour.hold(500)
    engine = worker(server, gpus, "rollout-0")
    assert await engine.claim(1) == ("fake-1",), "half of fake-0 is more than all of fake-1"
    await engine.leave()


async def test_nothing_is_given_back_before_its_memory_is_free(
    server: Coordinator, gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_RELEASE_SECONDS", 0.0)
    meter = FakeMeter(gpus)
    engine = LeasedDevices(server.address, "rollout-0", meter, 0.8, bound=True)
    await engine.claim(2)
    meter.hold(21)
    with pytest.raises(UnavailableError, match="has not freed its memory") as held:
        await engine.release()
    assert held.value.reason == "DEVICES_HELD"
    assert engine.held == ("fake-0", "fake-1")
    meter.hold(20)  # a fifth may stay behind
    assert await engine.release() == 80
    assert engine.held == ()
    await engine.leave()


async def test_a_process_that_computes_on_a_device_claims_the_same_again(
    server: Coordinator, gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_PATIENCE_SECONDS", 0.0)
    bound = worker(server, gpus, "rollout-0", bound=True)
    other = worker(server, gpus, "trainer-0", wanted="fake-0")
    assert await bound.claim(1) == ("fake-0",)
    await bound.release()
    assert await other.claim(1) == ("fake-0",)
    with pytest.raises(UnavailableError, match="fake-0: held by trainer-0") as busy:
        await bound.claim(1)  # fake-1 is free, and of no use to it
    assert busy.value.reason == "DEVICES_BUSY"
    await other.release()
    assert await bound.claim(1) == ("fake-0",)
    for each in (bound, other):
        await each.leave()


async def test_a_worker_that_has_lost_its_lease_ends(server: Coordinator, gpus: Path) -> None:
    server.runs.devices.seconds = 0.3
    lost, heir = worker(server, gpus, "rollout-0"), worker(server, gpus, "rollout-1")
    keeping = asyncio.create_task(lost.keep())
    await lost.claim(2)
    renewed = (await server.runs.devices.load()).leases["fake-0"].expires
    async with asyncio.timeout(60):
        while (await server.runs.devices.load()).leases["fake-0"].expires == renewed:
            await asyncio.sleep(0.01)
    await end_tasks(keeping)  # as if it was paused
    await heir.claim(1)
    server.runs.devices.seconds = 600.0
    with pytest.raises(DeviceLeaseLostError, match="rollout-0 with fence 1 does not hold"):
        async with asyncio.timeout(60):
            await lost.keep()
    await heir.leave()


async def test_a_process_whose_device_is_another_s_now_ends_while_others_are_free(
    server: Coordinator, gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps, another that may use nothing else takes its device: the next process of it is
    bound to nothing."""
    monkeypatch.setattr(holder, "_PATIENCE_SECONDS", 0.0)
    server.runs.devices.seconds = 1.0
    bound = worker(server, gpus, "rollout-0", bound=True)
    await bound.claim(1)
    await bound.release()
    server.runs.devices.seconds = 600.0
    taker = worker(server, gpus, "rollout-1", wanted="fake-0")
    assert await taker.claim(1) == ("fake-0",)
    keeping = asyncio.create_task(bound.keep())
    async with asyncio.timeout(60):
        while not keeping.done():
            with pytest.raises(UnavailableError):
                await bound.claim(1)
    with pytest.raises(DeviceLeaseLostError, match="fake-1 is free: it has to start anew"):
        await keeping
    anew = worker(server, gpus, "rollout-0", bound=True)
    assert await anew.claim(1) == ("fake-1",)
    for each in (taker, anew):
        await each.leave()


async def test_a_refusal_now_and_then_ends_no_process(
    server: Coordinator, gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was refused long ago does not count as waiting since."""
    monkeypatch.setattr(holder, "_PATIENCE_SECONDS", 0.0)
    server.runs.devices.seconds = 1.0
    bound = worker(server, gpus, "rollout-0", bound=True)
    await bound.claim(1)
    await bound.release()
    server.runs.devices.seconds = 600.0
    taker = worker(server, gpus, "trainer-0", wanted="fake-0")
    await taker.claim(1)
    keeping = asyncio.create_task(bound.keep())
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await bound.claim(1)
        await asyncio.sleep(2.5)  # more than two leases
    assert not keeping.done()
    await end_tasks(keeping)
    for each in (taker, bound):
        await each.leave()
