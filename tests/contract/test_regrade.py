"""RegradeSamples over real gRPC: other references, other scores, and the old ones untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rpc.client import stream
from rollpacker.rpc.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract.coordinator_cluster import (
    Cluster,
    Coordinator,
    cluster,
    coordinator,
)
from tests.contract.test_run_control import ask, paused_at
from tests.contract.test_run_control import rows as rows_to_add
from tests.tiny_run import run_settings, write_data

__all__ = ["cluster"]  # the fixture


async def regrade(c: Coordinator, name: str = "again", **request: Any) -> list[Any]:
    values = pb.RegradeSamplesRequest(**{"run_id": "r", "regrade_id": name, **request})
    return [step async for step in stream(lambda: c.stub.RegradeSamples(values, timeout=60))]


def files(directory: Path) -> dict[str, bytes]:
    """Everything that the run left."""
    return {
        str(path): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "regraded" not in path.parts
    }


def rows(step: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(step.file).read_text().splitlines()]


async def test_samples_are_scored_again_beside_the_old_scores(cluster: Cluster) -> None:  # noqa: F811
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        directory = Path((await c.until_ended()).run_directory)
        before = files(directory)
        same = await regrade(c)
        assert [step.step for step in same] == list(range(6))
        assert {step.changed_count for step in same} == {0}
        assert all(step.mean_reward == step.old_mean_reward for step in same)
        cluster.reward.flipped = True
        kept = await regrade(c)
        assert kept == same, "what has a reward under this name is not scored again"
        (changed,) = await regrade(c, "flipped", first_step=2, last_step=2)
        assert changed.step == 2
        assert changed.changed_count == changed.response_count > 0
        assert changed.mean_reward == 1 - changed.old_mean_reward
        assert all(row["reward"] == 1 - row["old_reward"] for row in rows(changed))
        assert Path(changed.file).parent == directory / "regraded" / "flipped"
        assert files(directory) == before


async def test_what_got_no_reward_is_scored_again_by_a_repeat(cluster: Cluster) -> None:  # noqa: F811
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, reward={"attempts": 1}))
        await c.until_ended()
        cluster.reward.failing = True
        first = await regrade(c, first_step=5)
        assert [step.none_count for step in first] == [step.response_count for step in first]
        assert not first[0].HasField("mean_reward")
        cluster.reward.failing = False
        (mended,) = await regrade(c, first_step=5)
        assert (mended.none_count, mended.changed_count) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "error", "what"),
    [
        ({"run_id": "nobody"}, NotFoundError, "there is no run"),
        ({"first_step": 99}, NotFoundError, "no samples of steps 99"),
        ({"name": "../evil"}, InvalidArgumentError, "regrade_id"),
    ],
)
async def test_a_wrong_request_says_what_to_change(
    cluster: Cluster,  # noqa: F811
    request_: dict[str, Any],
    error: type[Exception],
    what: str,
) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        with pytest.raises(error, match=what):
            await regrade(c, **request_)


async def test_a_prompt_that_left_the_data_is_named(cluster: Cluster) -> None:  # noqa: F811
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        write_data(cluster.directory / "train.jsonl", 1)
        with pytest.raises(FailedPreconditionError, match=r"prompt \d+ of step 0"):
            await regrade(c)


async def test_prompts_that_were_added_to_the_run_are_known(cluster: Cluster) -> None:  # noqa: F811
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
        await ask(c, "AddPrompts", rows=rows_to_add("new-0", "new-1"))
        await ask(c, "ResumeRun")
        await c.until_ended()
        steps = await regrade(c)
        assert {step.changed_count for step in steps} == {0}
        prompts = {row["draw"]["prompt_id"] for step in steps for row in rows(step)}
        assert {"new-0", "new-1"} <= prompts
