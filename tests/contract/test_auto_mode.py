"""Mode auto over real gRPC and Redis: choices are events and metrics, and outlive a crash."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollpacker.policy import ladder_memory
from rollpacker.policy.ladder_memory import STEPS_SEEN, is_due
from rollpacker.simulation.recorded_run import replay_rows
from rollpacker.types import RoundKind
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.contract.test_run_control import ask, paused_at, update
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
PROMPTS, PROMPTS_PER_STEP = 256, 8


def auto_settings(directory: Path, **tail: Any) -> dict[str, Any]:
    tail_batching = {
        "mode": "auto",
        "prompts_per_step": PROMPTS_PER_STEP,
        "max_deferral_age": 32,
        **tail,
    }
    return run_settings(directory, PROMPTS, tail_batching=tail_batching)


async def choices(run: Coordinator, steps: int) -> list[pb.LadderChoice]:
    """Those that are events of the ended run; one may stand behind its last step."""
    events = run.stub.WatchRun(pb.WatchRunRequest(run_id="r"))
    found = [event.ladder_chosen async for event in events if event.HasField("ladder_chosen")]
    return [choice for choice in found if choice.step < steps]


def assert_as_due(found: list[pb.LadderChoice], steps: list[Any]) -> None:
    """Each choice once, when it is due; one of no ladder may wait, for the end of the queue."""
    chosen = {choice.step: choice for choice in found}
    assert list(chosen) == sorted(chosen)
    assert len(chosen) == len(found)
    kinds = [types_pb2.RoundKind.Name(step.round_kind) for step in steps]
    newest = [RoundKind(kind.removeprefix("ROUND_KIND_").lower()) for kind in kinds]
    waits = False
    for step in range(1, len(steps)):
        levels = int(steps[step - 1].metrics["tail/deferral_levels"])
        if not (waits and levels):  # else the queue may have ended
            seen = newest[max(0, step - STEPS_SEEN) : step][::-1]
            assert (step in chosen) == is_due(step, (2.0,) * levels, seen)
        if step in chosen:
            waits = not chosen[step].speculation_factors


def trained(schedule: list[Any]) -> list[Any]:
    return sorted(draw for _, draws in schedule for draw in draws)


async def test_choices_are_events_and_metrics_and_come_out_of_a_replay_again(
    cluster: Cluster,
) -> None:
    """Though the cap is raised meanwhile."""
    for replica in cluster.rollouts:
        replica.slots, replica.token_seconds = 64, 0.001
    async with coordinator(cluster) as run:
        await paused_at(cluster, run, auto_settings(cluster.directory), 6)
        await update(run, sampling={"max_response_tokens": 60})
        await ask(run, "ResumeRun")
        await run.until_ended()
        schedule = await run.schedule()
        steps = await run.steps()
        chosen = await choices(run, len(steps))
    assert len(trained(schedule)) == PROMPTS
    assert_as_due(chosen, steps)
    assert all(choice.reason and "\n" not in choice.reason for choice in chosen)
    assert any(choice.reason.startswith("takes") for choice in chosen)
    levels = [step.metrics["tail/deferral_levels"] for step in steps]
    for choice in chosen:
        if choice.speculation_factors:  # else it waits for the end of the queue
            metrics = steps[choice.step].metrics
            factors = [
                metrics[f"tail/speculation_factor_{level}"]
                for level in range(int(levels[choice.step]))
            ]
            assert factors == list(choice.speculation_factors)
    rows = list(replay_rows(cluster.directory / "runs" / "r"))
    assert rows[-1] == {"figure": "ladders", "choices": len(chosen), "differences": 0}
    reasons = [row["reason"] for row in rows if row["figure"] == "ladder"]
    assert reasons == [choice.reason for choice in chosen]


async def test_sizes_are_tried_and_come_out_of_a_replay_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fakes decode as fast at any size, so the hope that is tried first fails."""
    for replica in cluster.rollouts:
        replica.slots, replica.token_seconds = 64, 0.001
        replica.weight_kv_tokens = 0  # the whole step is hoped to be halved, on any machine
    # Nor does it matter how long this machine takes to answer.
    monkeypatch.setattr(ladder_memory, "_MIN_ANSWERS", math.inf)
    async with coordinator(cluster) as run:
        await run.start(auto_settings(cluster.directory, max_tensor_parallel_size=2))
        await run.until_ended()
        steps = await run.steps()
        schedule = await run.schedule()
        chosen = await choices(run, len(steps))
    assert len(trained(schedule)) == PROMPTS
    sizes = [step.metrics["rollout/tensor_parallel_size"] for step in steps]
    assert sizes[:3] == [1, 1, 1]
    assert set(sizes) == {1, 2}
    for choice in chosen:
        step = steps[choice.step]
        assert set(choice.tensor_parallel_sizes) <= {1, 2}
        if choice.speculation_factors:
            in_force = choice.tensor_parallel_sizes[step.level]
            assert step.metrics["rollout/tensor_parallel_size"] == in_force
    rows = list(replay_rows(cluster.directory / "runs" / "r"))
    assert rows[-1] == {"figure": "ladders", "choices": len(chosen), "differences": 0}


async def test_a_crash_repeats_no_choice_and_loses_no_draw(cluster: Cluster) -> None:
    values = auto_settings(cluster.directory)
    async with coordinator(cluster) as run:
        await run.start(values)
        async with asyncio.timeout(60):
            while (await run.get()).step < 9:
                await asyncio.sleep(0.005)
    async with coordinator(cluster) as run:
        await run.until_ended()
        schedule = await run.schedule()
        steps = await run.steps()
        chosen = await choices(run, len(schedule))
    assert len({name for name, _ in trained(schedule)}) == PROMPTS == len(trained(schedule))
    assert_as_due(chosen, steps)


async def test_a_run_file_shows_the_mode_and_its_first_ladder(cluster: Cluster) -> None:
    async with coordinator(cluster) as run:
        await run.start(auto_settings(cluster.directory, deferral_levels=1) | {"max_steps": 1})
        await run.until_ended()
        step = (await run.steps())[0]
    assert step.metrics["tail/deferral_levels"] == 1
    kept = json.loads((cluster.directory / "runs" / "r" / "run.json").read_text())
    assert kept["mode"] == "auto"
