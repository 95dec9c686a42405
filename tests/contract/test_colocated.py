"""Colocated placement, as the coordinator does it: real gRPC, fake workers."""

from __future__ import annotations

import pytest

from rollpacker.rpc.errors import UnavailableError
from rollpacker.settings import SettingsError, parse_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract import fake_workers as fakes
from tests.contract.coordinator_cluster import (  # noqa: F401  a fixture
    Cluster,
    cluster,
    coordinator,
)
from tests.tiny_run import run_settings

PROMPTS = 12


async def test_engines_have_let_go_whenever_the_trainer_works(
    cluster: Cluster,  # noqa: F811
) -> None:
    seen: list[tuple[str, bool]] = []
    sampled: list[int] = []

    async def look(name: str) -> None:
        seen.append((name, any(rollout.spec.resident for rollout in cluster.rollouts)))
        sampled.append(sum(rollout.group_count for rollout in cluster.rollouts))

    cluster.trainer.before_work = look
    async with coordinator(cluster) as c:
        values = run_settings(cluster.directory, PROMPTS, placement="colocated")
        await c.start(values)
        await c.until_ended()
        steps = await c.steps()
    assert not any(resident for _, resident in seen)
    assert [name for name, _ in seen] == ["OpenRun", *["StartStep", "FinishStep"] * len(steps)]
    assert sampled == sorted(sampled)
    assert len(set(sampled)) == 1 + len(steps), "a round before each step"


async def test_an_engine_that_comes_while_the_trainer_works_is_asked_to_let_go(
    cluster: Cluster,  # noqa: F811
) -> None:
    late = fakes.FakeRollout("rollout-2")
    server = fakes.rollout_server(late)
    await server.start()
    async with coordinator(cluster) as c:

        async def goes_on_when_it_has_let_go(name: str) -> None:
            if name != "OpenRun":
                return
            beat = pb.HeartbeatRequest(
                worker_id="rollout-2", address=server.address, kind=pb.WORKER_KIND_ROLLOUT
            )
            await c.stub.Heartbeat(beat)
            await late.applied.wait()
            assert not late.spec.resident

        cluster.trainer.before_work = goes_on_when_it_has_let_go
        await c.start(run_settings(cluster.directory, PROMPTS, placement="colocated"))
        await c.until_ended()
    await server.stop()
    assert len(late.sizes) > 1, "and served rounds afterwards"


async def test_engines_with_devices_of_their_own_let_go_when_the_trainer_finds_none(
    cluster: Cluster,  # noqa: F811
) -> None:
    """Those of a colocated run before, or a spare one that took a killed trainer's."""
    refused: list[bool] = []

    async def busy(name: str) -> None:
        resident = any(rollout.spec.resident for rollout in cluster.rollouts)
        if name == "FinishStep" and not refused:
            refused.append(resident)
            raise UnavailableError("DEVICES_BUSY", "held by rollout-0")
        if name == "FinishStep" and len(refused) == 1:
            refused.append(resident)

    cluster.trainer.before_work = busy
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, PROMPTS))
        await c.until_ended()
    assert refused == [True, False]


def test_a_colocated_run_releases_all_replicas_or_none(cluster: Cluster) -> None:  # noqa: F811
    values = run_settings(
        cluster.directory, PROMPTS, placement="colocated", tail_batching={"scale_down": True}
    )
    with pytest.raises(SettingsError, match="tail_batching.scale_down: true with placement"):
        parse_run_settings(values)
