"""What a coordinator and its workers tell of themselves while a run goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from rollpacker.observability.metric_names import METRICS, find_metric, prometheus_name
from rollpacker.policy.alarms import PREFIX
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import NotFoundError
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.readings import coordinator_readings
from tests.contract.test_coordinator_service import (
    Cluster,
    cluster,  # noqa: F401  a fixture
    coordinator,
)
from tests.contract.test_run_control import paused_at, until_idle
from tests.tiny_run import run_settings

COORDINATOR = "/rollpacker.v1.CoordinatorService"


async def test_every_metric_of_a_run_stands_in_the_registry(cluster: Cluster) -> None:  # noqa: F811
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, prompts=40))
        run = await c.until_ended()
        steps = await c.steps()
    names = {name for step in steps for name in step.metrics if not name.startswith(PREFIX)}
    assert {name for name in names if find_metric(name) is None} == set()
    silent = {m.name for m in METRICS if not m.name.startswith("trainer/")} - names
    assert {name for name in silent if "_N" not in name and "<name>" not in name} == set()
    line = json.loads((Path(run.run_directory) / "metrics.jsonl").read_text().splitlines()[0])
    assert line["critic/rewards/mean"] == line["reward/mean"]
    assert line["timing_s/gen"] == line["timing_s/rollout"]


async def test_a_run_without_any_reward_raises_the_alarm(cluster: Cluster) -> None:  # noqa: F811
    cluster.reward.never_right = True
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, prompts=24))
        await c.until_ended()
        steps = await c.steps()
    raised = [PREFIX + "no_reward" in step.metrics for step in steps]
    assert raised == [False, False] + [True] * (len(steps) - 2)


async def test_prometheus_sees_workers_the_run_and_its_newest_step(
    cluster: Cluster,  # noqa: F811
) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory, prompts=400), 1)
        found = {
            (reading.name, *reading.labels.values()): reading.value
            for reading in await coordinator_readings(c.runs, c.workers)
        }
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        after = {reading.name for reading in await coordinator_readings(c.runs, c.workers)}
    assert found["rollpacker_coordinator_leads",] == 1.0
    assert found["rollpacker_workers", "rollout"] == 2.0
    assert found["rollpacker_workers", "trainer"] == 1.0
    assert found["rollpacker_run_steps", "r"] == 1.0
    assert found["rollpacker_run_planned_steps", "r"] == 100.0
    assert found[prometheus_name("tail/launched_groups"), "r"] > 0
    assert found["rollpacker_alarm", "r", "truncated"] == 0.0
    assert after == {"rollpacker_coordinator_leads", "rollpacker_workers"}


def calls(method: str, code: str) -> float:
    labels = {"method": f"{COORDINATOR}/{method}", "code": code}
    return REGISTRY.get_sample_value("rollpacker_rpc_calls_total", labels) or 0.0


async def test_calls_are_counted_by_status_and_timed(cluster: Cluster) -> None:  # noqa: F811
    before = {code: calls("GetRun", code) for code in ("OK", "NOT_FOUND")}
    async with coordinator(cluster) as c:
        with pytest.raises(NotFoundError):
            await c.get("nobody")
        await c.start(run_settings(cluster.directory, prompts=8))
        await c.until_ended()
    await until_idle(cluster)
    assert calls("GetRun", "NOT_FOUND") == before["NOT_FOUND"] + 1
    assert calls("GetRun", "OK") > before["OK"]
    labels = {"method": "/rollpacker.v1.RolloutService/GenerateGroup"}
    assert (REGISTRY.get_sample_value("rollpacker_rpc_seconds_count", labels) or 0) >= 8
    assert REGISTRY.get_sample_value("rollpacker_rpc_running", labels) == 0


async def test_a_stream_that_its_caller_leaves_is_counted_as_cancelled(
    cluster: Cluster,  # noqa: F811
) -> None:
    before = calls("WatchRun", "CANCELLED")
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, prompts=400))
        watching = c.stub.WatchRun(pb.WatchRunRequest(run_id="r"))
        await anext(aiter(watching))
        watching.cancel()
        async with asyncio.timeout(60):
            while calls("WatchRun", "CANCELLED") == before:
                await asyncio.sleep(0.01)
        await call(lambda: c.stub.StopRun(pb.StopRunRequest(run_id="r", mode=3)))
