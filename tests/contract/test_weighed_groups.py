"""Selection weights over real gRPC and Redis: what counts how much is known to all, and a replay
comes to the same, behind a crash too. The fakes' responses change with every update."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollpacker.policy.selection_weights import WeighedSums
from rollpacker.simulation.recorded_run import replay_rows
from rollpacker.store.records import ChosenLadder, RunState
from rollpacker.types import DrawId, PromptGroup
from services.coordinator import driver
from services.coordinator.outputs.run_outputs import read_step_samples
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
PROMPTS, PROMPTS_PER_STEP = 96, 8
SWITCH = 8


def settings(directory: Path, **tail: Any) -> dict[str, Any]:
    tail_batching = {
        "mode": "exact",
        "prompts_per_step": PROMPTS_PER_STEP,
        "responses_per_prompt": 4,
        "speculation_factors": [1.5, 2.0],
        "max_deferral_age": 32,
        "selection_weights": True,
        **tail,
    }
    return run_settings(directory, PROMPTS, tail_batching=tail_batching)


async def trained(run: Coordinator, directory: Path) -> list[list[PromptGroup]]:
    """By step, as the files have them."""
    steps = await run.steps()
    found = [read_step_samples(directory / "runs" / "r", step.step) for step in steps]
    return [groups for groups in found if groups is not None]


def lengths(group: PromptGroup) -> list[int]:
    return [len(scored.response.token_ids) for scored in group.responses]


def weights(steps: list[list[PromptGroup]]) -> dict[DrawId, float]:
    return {group.draw.id: group.selection_weight for step in steps for group in step}


def replayed(directory: Path) -> dict[str, Any]:
    """The same, from the logs of the rounds: how many differ, and what they are on average."""
    rows = replay_rows(directory / "runs" / "r")
    (row,) = (row for row in rows if row["figure"] == "selection_weights")
    return row


async def test_groups_count_by_the_races_that_they_lost_and_metrics_tell_it(
    cluster: Cluster,
) -> None:
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory))
        await run.until_ended()
        steps = await trained(run, cluster.directory)
        metrics = [step.metrics for step in await run.steps()]
    found = weights(steps)
    assert len(found) == PROMPTS
    at_once = [g.selection_weight for step in steps for g in step if g.draw.first_step == g.step]
    assert set(at_once) == {1.0}
    assert 0.0 in found.values()
    assert max(found.values()) > 1.0
    row = replayed(cluster.directory)
    assert (row["differences"], row["groups"]) == (0, PROMPTS)
    assert row["mean_weight"] == pytest.approx(metrics[-1]["selection/mean_weight"], abs=1e-4)
    assert row["deferred_groups"] == PROMPTS - len(at_once)
    sums = WeighedSums()
    for groups, values in zip(steps, metrics, strict=True):
        for group in groups:
            sums = sums.plus(group.selection_weight, lengths(group))
        own = [group.selection_weight for group in groups]
        assert values["selection/zero_weight_groups"] == own.count(0.0)
        assert values["selection/largest_weight"] == max(own)
        assert values["selection/effective_share"] == pytest.approx(sums.effective_share)
        assert values["selection/mean_weight"] == pytest.approx(sums.mean_weight)
        mean = values["bias/weighed_ratio"] * values["bias/uncensored_mean"]
        assert mean == pytest.approx(sums.mean_length)


async def test_groups_that_were_emitted_before_a_crash_keep_their_weights(cluster: Cluster) -> None:
    """And the others have those that follow from what the run then knows."""
    for step in (3, 6, 9):
        async with coordinator(cluster) as run:
            await run.start(settings(cluster.directory))
            async with asyncio.timeout(60):
                while (await run.get()).step < step:
                    await asyncio.sleep(0.002)
    async with coordinator(cluster) as run:
        await run.until_ended()
        steps = await trained(run, cluster.directory)
    found = weights(steps)
    assert len(found) == PROMPTS
    assert replayed(cluster.directory)["differences"] == 0
    assert len(set(found.values())) > 2


@pytest.mark.parametrize("tail", [{"selection_weights": False}, {"selection_weights": None}])
async def test_mode_exact_counts_all_groups_alike_unless_it_is_told(
    cluster: Cluster, tail: dict[str, Any]
) -> None:
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory, **tail))
        await run.until_ended()
        found = weights(await trained(run, cluster.directory))
        (*_, last) = await run.steps()
    assert set(found.values()) == {1.0}
    assert last.metrics["selection/effective_share"] == 1.0
    assert last.metrics["bias/weighed_ratio"] == pytest.approx(last.metrics["bias/ratio"])


async def test_mode_auto_weighs_where_it_is_told_to(cluster: Cluster) -> None:
    tail = {"mode": "auto", "speculation_factors": None}
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory, **tail))
        await run.until_ended()
        steps = await trained(run, cluster.directory)
    assert replayed(cluster.directory)["differences"] == 0
    assert set(weights(steps).values()) != {1.0}


async def test_mode_auto_begins_to_weigh_in_the_middle_of_a_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step that the planner says, also draws that lost their race before."""

    async def any_ladder(_store: Any, state: RunState, _settings: Any) -> ChosenLadder | None:
        return ChosenLadder(SWITCH, (1.5, 2.0), "takes", (), True) if state.step == SWITCH else None

    monkeypatch.setattr(driver, "chosen_ladder", any_ladder)
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory, mode="auto", selection_weights=None))
        await run.until_ended()
        steps = await trained(run, cluster.directory)
    row = replayed(cluster.directory)
    assert (row["differences"], row["groups"]) == (0, sum(map(len, steps[SWITCH:])))
    assert set(weights(steps[:SWITCH]).values()) == {1.0}
    lost_before = {
        g.draw.id for groups in steps[SWITCH:] for g in groups if g.draw.first_step < SWITCH
    }
    assert any(weights(steps)[draw] != 1.0 for draw in lost_before)


async def test_a_weight_that_its_logs_do_not_give_is_a_difference(cluster: Cluster) -> None:
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory))
        await run.until_ended()
    samples = cluster.directory / "runs" / "r" / "samples" / "step_000000.jsonl"
    text = samples.read_text()
    samples.write_text(text.replace('"selection_weight":1.0', '"selection_weight":1.5'))
    assert replayed(cluster.directory)["differences"] == PROMPTS_PER_STEP


async def test_a_step_whose_line_is_not_written_yet_is_not_compared(cluster: Cluster) -> None:
    async with coordinator(cluster) as run:
        await run.start(settings(cluster.directory))
        await run.until_ended()
        (*_, last) = await run.steps()
    files = cluster.directory / "runs" / "r"
    (files / "samples" / f"step_{last.step:06d}.jsonl").unlink()
    lines = (files / "metrics.jsonl").read_text().splitlines(keepends=True)
    (files / "metrics.jsonl").write_text("".join(lines[:-1]))
    row = replayed(cluster.directory)
    assert (row["differences"], row["groups"]) == (0, PROMPTS - PROMPTS_PER_STEP)
