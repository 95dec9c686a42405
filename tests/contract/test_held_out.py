"""Held-out evaluation, domains and the place in the data: real gRPC and Redis, fake workers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rpc.client import call
from rollpacker.rpc.errors import FailedPreconditionError, NotFoundError
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.readings import coordinator_readings
from tests.contract import coordinator_cluster
from tests.contract.coordinator_cluster import Cluster, Coordinator, coordinator
from tests.contract.test_run_control import ask, paused_at, until
from tests.tiny_run import run_settings, write_data

cluster = coordinator_cluster.cluster  # the fixture


async def evaluate(c: Coordinator, run_id: str = "r") -> pb.RunEvaluationResponse:
    request = pb.RunEvaluationRequest(run_id=run_id)
    return await call(lambda: c.stub.RunEvaluation(request, timeout=60))


async def until_requested(c: Coordinator) -> None:
    """Wait until somebody waits for a measurement of run r."""
    active = c.runs.active("r")
    async with asyncio.timeout(240):
        while active.driver is None or not active.driver.validator.is_requested:
            await asyncio.sleep(0.005)


def with_sets(cluster: Cluster, prompts: int = 24, **validation: Any) -> dict[str, Any]:
    values = run_settings(cluster.directory, prompts)
    sets = []
    for name, count in (("easy", 3), ("hard", 2)):
        write_data(cluster.directory / f"{name}.jsonl", count)
        sets.append({"name": name, "path": str(cluster.directory / f"{name}.jsonl")})
    values["validation"] = {"sets": sets, "responses_per_prompt": 2, "greedy": True, **validation}
    return values


def lines(run: pb.Run) -> list[dict[str, Any]]:
    path = Path(run.run_directory) / "validation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_set_is_measured_before_at_the_interval_and_after(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await c.start(with_sets(cluster, interval=3))
        found = lines(await c.until_ended())
    assert [(line["step"], line["name"]) for line in found] == [
        (step, name) for step in (0, 3, 6) for name in ("easy", "hard")
    ]
    for line in found:
        count = {"easy": 3, "hard": 2}[line["name"]]
        assert line["values"]["count"] == 2 * count
        assert line["values"]["greedy_count"] == count
        assert {"accuracy", "mean@2", "pass@1", "pass@2"} <= line["values"].keys()


async def test_an_evaluation_on_demand_measures_between_steps_and_changes_no_step(
    cluster: Cluster,
) -> None:
    values = with_sets(cluster, prompts=80)
    async with coordinator(cluster) as c:
        await c.start(values, run_id="undisturbed")
        await c.until_ended("undisturbed")
        expected = await c.schedule("undisturbed")
    cluster.trainer.disk = type(cluster.trainer.disk)()
    cluster.trainer.restart()
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 3)
        asked = asyncio.gather(evaluate(c), evaluate(c))
        await until_requested(c)
        await ask(c, "ResumeRun")
        first, second = await asked
        run = await c.until_ended()
        assert await c.schedule() == expected
    assert first == second
    assert first.weight_version == 3
    assert [scores.name for scores in first.sets] == ["easy", "hard"]
    by_version = {(line["step"], line["name"]): line["values"] for line in lines(run)}
    for scores in first.sets:
        assert dict(scores.scores) == by_version[first.weight_version, scores.name]


async def test_the_command_evaluates_a_run_and_prints_its_scores(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        gate = cluster.reward.hold()  # the run begins when it was asked to evaluate
        await c.start(with_sets(cluster))
        command = ("from rollpacker.cli.main import app; app()", "evaluate", "r", "--json")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", *command, "--coordinator", c.address), stdout=subprocess.PIPE
        )
        await until_requested(c)
        gate.set()
        out, _ = await process.communicate()
        run = await c.stop(pb.STOP_MODE_IMMEDIATELY)
    assert process.returncode == 0
    told = json.loads(out)
    measured = {
        line["name"]: line["values"]
        for line in lines(run)
        if line["step"] == int(told["weight_version"])
    }
    assert {held_out["name"]: held_out["scores"] for held_out in told["sets"]} == measured


async def test_prometheus_sees_the_newest_scores(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, with_sets(cluster), 1)
        asked = asyncio.create_task(evaluate(c))
        await until_requested(c)
        await ask(c, "ResumeRun", until_step=2)
        measured = await asked
        await until(c, pb.Run.STATE_PAUSED)
        found = await coordinator_readings(c.runs, c.workers)
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
    readings = {(r.name, *r.labels.values()): r.value for r in found}
    assert readings["rollpacker_held_out_weight_version", "r"] == measured.weight_version
    for scores in measured.sets:
        for score, value in scores.scores.items():
            assert readings["rollpacker_held_out_score", "r", scores.name, score] == value


async def test_the_same_weights_give_the_same_scores_again(cluster: Cluster) -> None:
    found = []
    for run_id in ("one", "two"):
        async with coordinator(cluster) as c:
            await c.start(with_sets(cluster), run_id=run_id)
            found.append([(x["step"], x["values"]) for x in lines(await c.until_ended(run_id))])
        cluster.trainer.disk = type(cluster.trainer.disk)()
        cluster.trainer.restart()
    assert found[0] == found[1]


async def test_an_evaluation_that_cannot_be_is_refused_with_the_reason(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        with pytest.raises(NotFoundError, match="there is no run"):
            await evaluate(c)
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
        with pytest.raises(FailedPreconditionError, match="no held-out set; start one with data"):
            await evaluate(c)
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        with pytest.raises(FailedPreconditionError, match="is not being driven"):
            await evaluate(c)


async def test_a_stop_answers_whoever_waits_for_an_evaluation(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, with_sets(cluster), 1)
        cluster.reward.unavailable = 10**9  # no round ends any more
        await ask(c, "ResumeRun")
        waiting = asyncio.create_task(evaluate(c))
        await until_requested(c)
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        with pytest.raises(FailedPreconditionError, match="ended before the measurement"):
            await waiting


def mixed(cluster: Cluster) -> dict[str, Any]:
    """48 prompts of two domains, three of the first to one of the second."""
    values = run_settings(cluster.directory)
    sources = []
    for name, count, weight in (("short", 30, 3), ("long", 18, 1)):
        write_data(cluster.directory / f"{name}.jsonl", count)
        path = str(cluster.directory / f"{name}.jsonl")
        sources.append({"name": name, "path": path, "weight": weight})
    values["data"] = {"sources": sources}
    return values


async def test_a_mix_goes_on_after_crashes_with_the_same_draws_seeds_and_steps(
    cluster: Cluster,
) -> None:
    values = mixed(cluster)
    async with coordinator(cluster) as c:
        await c.start(values, run_id="undisturbed")
        await c.until_ended("undisturbed")
        expected = await c.schedule("undisturbed")
    cluster.trainer.disk = type(cluster.trainer.disk)()
    for step in (1, 4, 9):
        cluster.trainer.restart()
        async with coordinator(cluster) as c:  # leaving the block is a crash
            await c.start(values)
            while (await c.get()).step < step:
                await asyncio.sleep(0.002)
    cluster.trainer.restart()
    async with coordinator(cluster) as c:
        await c.until_ended()
        assert await c.schedule() == expected


async def test_trained_and_queued_groups_of_a_domain_are_what_the_mix_gave(
    cluster: Cluster,
) -> None:
    """At every commit, over short and long rounds; ages of the queue do not matter."""
    async with coordinator(cluster) as c:
        await c.start(mixed(cluster))
        run = await c.until_ended()
        steps = await c.steps()
    assert run.step == 12
    for step in steps:
        given = {
            name: step.metrics[f"domain/{name}/trained_total"]
            + step.metrics.get(f"domain/{name}/queued", 0)
            for name in ("short", "long")
        }
        total = sum(given.values())
        assert abs(given["short"] - total * 3 / 4) < 1
    trained = Counter(draw.prompt_id.partition("/")[0] for step in steps for draw in step.draws)
    assert trained == {"short": 36, "long": 12}
    assert steps[-1].metrics["domain/short/trained_total"] == 36
    draws = [(draw.epoch, draw.prompt_id) for step in steps for draw in step.draws]
    assert len(set(draws)) == len(draws) == 48


async def test_a_run_whose_data_has_changed_meanwhile_is_refused_and_goes_on_with_the_old_rows(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=80)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
        await ask(c, "ResumeRun")
    write_data(cluster.directory / "train.jsonl", 80, text="{i}+2=")
    async with coordinator(cluster) as c:
        run = await c.until_ended(succeeded=False)
        assert run.state == pb.Run.STATE_FAILED
        assert "is not what it was at its start (now 80 prompts" in run.failure
        write_data(cluster.directory / "train.jsonl", 80)
        await c.start(values)
        assert (await c.until_ended()).step == 20
