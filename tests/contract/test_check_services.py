"""`check` against a coordinator and workers over real gRPC."""

from __future__ import annotations

from rollpacker.cli.doctor import Finding
from rollpacker.cli.service_findings import service_findings
from rollpacker.data import load_run_data
from rollpacker.settings import RunSettings, parse_run_settings
from rollpacker.types import GraderKind, Prompt
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract import coordinator_cluster
from tests.contract.coordinator_cluster import Cluster, coordinator
from tests.tiny_run import run_settings

cluster = coordinator_cluster.cluster  # the fixture


def settings(cluster: Cluster) -> RunSettings:
    return parse_run_settings(run_settings(cluster.directory))


def levels(findings: list[Finding], subject: str) -> list[str]:
    return [finding.level for finding in findings if finding.subject.startswith(subject)]


async def test_a_whole_stack_that_takes_the_run_is_all_ok(cluster: Cluster) -> None:
    values = settings(cluster)
    async with coordinator(cluster) as c:
        prompts = list(load_run_data(values).dataset)
        found = await service_findings(c.address, values, prompts)
        assert [f for f in found if f.level != "ok"] == []
        assert not (await c.runs.list())  # nothing was started
    for subject, count in (("coordinator", 1), ("rollout", 2), ("reward", 2), ("trainer", 1)):
        assert levels(found, subject) == ["ok"] * count


async def test_kinds_without_a_worker_and_workers_that_are_away_are_bad(cluster: Cluster) -> None:
    async with coordinator(cluster, register=False) as c:
        request = pb.HeartbeatRequest(
            worker_id="rollout-9", address="127.0.0.1:9", kind=pb.WORKER_KIND_ROLLOUT
        )
        await c.stub.Heartbeat(request)
        found = await service_findings(c.address, settings(cluster), [])
    assert levels(found, "reward") == levels(found, "trainer") == ["bad"]
    (away,) = [finding for finding in found if finding.subject == "rollout"]
    assert away.level == "bad"
    assert away.what.startswith("rollout-9 at 127.0.0.1:9: no answer from")


async def test_data_that_only_the_coordinator_cannot_read_is_bad(cluster: Cluster) -> None:
    values = settings(cluster)
    (cluster.directory / "train.jsonl").unlink()
    async with coordinator(cluster) as c:
        found = await service_findings(c.address, values, [])
    (bad,) = [finding for finding in found if finding.level == "bad"]
    assert bad.what.startswith("refuses the run: ")
    assert "train.jsonl: cannot be read" in bad.what


async def test_an_active_run_is_noted(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        cluster.reward.unavailable = 10**9  # it never ends
        await c.start(run_settings(cluster.directory))
        found = await service_findings(c.address, settings(cluster), [])
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
    assert "note" in levels(found, "coordinator")


async def test_a_prompt_that_the_reward_service_cannot_score_is_bad(
    cluster: Cluster,
) -> None:
    cluster.reward.failing = True
    prompt = Prompt("p7", (1,), "a", GraderKind.MATH, "{}")
    async with coordinator(cluster) as c:
        found = await service_findings(c.address, settings(cluster), [prompt])
    (bad,) = [finding for finding in found if finding.level == "bad"]
    assert bad.subject == "reward math"
    assert bad.what == "prompt p7: no use"
