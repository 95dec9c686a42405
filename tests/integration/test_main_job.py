"""The main job as real processes, each of them killed with SIGKILL at many moments.

One stack carries every run of this module. An undisturbed run says what must come out: every
disturbed one has to train the same draws with the same seeds in the same steps, from the same
responses, to the same weights bit by bit.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from rollpacker.round_log import replayed
from rollpacker.simulation.recorded_run import recorded_rounds
from rollpacker.store import keys
from services.trainer.packing import WINDOW_GROUPS
from tests.integration.real_runs import (
    OUTCOME,
    RESULT,
    Moment,
    RealStack,
    Trace,
    proof_settings,
    running_stack,
    trained_draws,
)
from tests.tiny_run import write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROMPTS, PROMPTS_PER_STEP, STEPS = 96, 4, 24
VALUES = {
    "tail_batching": {"prompts_per_step": PROMPTS_PER_STEP, "responses_per_prompt": 4},
    "sampling": {"max_response_tokens": 120},
}
REPLICAS = ("rollout-0", "rollout-1")
# Where a step may be hit: as it begins, between its groups, in its update, before its commit.
STAGES = [*range(PROMPTS_PER_STEP + 1), OUTCOME, RESULT]


class Job(NamedTuple):
    """The stack of this module, the run's settings, and what the run must do."""

    real: RealStack
    values: dict[str, Any]
    undisturbed: Trace


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Job]:
    directory = tmp_path_factory.mktemp("job")
    write_model(directory / "model")
    values = proof_settings(directory, PROMPTS, **VALUES)
    # One slot: a replica decodes one response after the other, so most of a step is rollout.
    async with running_stack(directory, slots=1, rollouts=2) as real:
        yield Job(real, values, await real.run("undisturbed", values))


async def assert_undisturbed(job: Job, run_id: str) -> None:
    """The run has come to its end, and left what the undisturbed run left."""
    run = await job.real.succeeded(run_id)
    trace, expected = await job.real.trace(run_id), job.undisturbed
    assert (run.step, run.weight_version, run.deferred_draw_count) == (STEPS, STEPS, 0)
    assert trace.schedule == expected.schedule
    assert trace.responses == expected.responses
    assert trace.metrics == expected.metrics
    assert trace.weights.keys() == expected.weights.keys()
    assert trace.weights == expected.weights
    lines = job.real.metrics(run_id)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert len(trace.responses) == STEPS
    assert all(step.metrics["reward/none_count"] == 0 for step in await job.real.steps(run_id))
    assert await job.real.redis.llen(keys.superseded_steps(run_id)) == 0
    rounds = recorded_rounds(job.real.stack.layout.run_directory / run_id)
    assert len(rounds) == STEPS
    assert [line for round_ in rounds for line in replayed(round_.logged)] == []


def random_moments(seed: str, count: int) -> list[Moment]:
    """Moments in different steps, in order; none in the last steps, so that each is reached."""
    noise = random.Random(seed)
    steps = sorted(noise.sample(range(1, STEPS - 7), count))
    return [Moment(step, noise.choice(STAGES)) for step in steps]


async def test_the_undisturbed_run_uses_every_kind_of_round_and_learns(job: Job) -> None:
    """Else the other tests of this module would prove little."""
    kinds = {(kind, level) for kind, level, _ in job.undisturbed.schedule}
    assert len(kinds) >= 4
    assert Counter(trained_draws(job.undisturbed)) == Counter(
        f"0:{row}" for row in range(1, PROMPTS + 1)
    )
    norms = [line["trainer/grad_norm"] for line in job.undisturbed.metrics]
    assert sum(norm > 0 for norm in norms) > STEPS / 2
    assert len(set(job.undisturbed.weights.values())) == len(job.undisturbed.weights) > 1
    await assert_undisturbed(job, "undisturbed")


@pytest.mark.parametrize(
    ("name", "count"), [("coordinator", 5), ("trainer-0", 3), ("redis", 5), ("reward-0", 4)]
)
async def test_kills_at_random_moments_change_nothing(job: Job, name: str, count: int) -> None:
    run_id, real = f"kill-{name}", job.real
    noise = random.Random(run_id)
    await real.start(run_id, job.values, held=True)
    for moment in random_moments(run_id, count):
        await real.reach(run_id, moment)
        await asyncio.sleep(noise.uniform(0, 0.03))  # into what follows the moment
        await real.kill(name)
    await assert_undisturbed(job, run_id)


async def test_kills_of_replicas_amid_their_streams_change_nothing(job: Job) -> None:
    run_id, real = "kill-rollout", job.real
    await real.start(run_id, job.values, held=True)
    for moment in random_moments(run_id, 4):
        await real.kill(await real.decoding(run_id, moment.step))
    await real.decoding(run_id, STEPS - 6)
    await asyncio.gather(*map(real.kill, REPLICAS))
    await assert_undisturbed(job, run_id)


async def test_a_kill_of_everything_at_once_changes_nothing(job: Job) -> None:
    """The run goes on from what Redis has on disk, and from the checkpoint."""
    run_id, real = "kill-all", job.real
    await real.start(run_id, job.values, held=True)
    await real.reach(run_id, Moment(7, OUTCOME))
    await asyncio.gather(*map(real.kill, real.stack.pids))
    await assert_undisturbed(job, run_id)


async def test_kills_between_the_update_and_its_commit_change_nothing(job: Job) -> None:
    """The coordinator is stopped before its commit, while the trainer records the result."""
    run_id, real = "kill-between", job.real
    await real.start(run_id, job.values, held=True)
    for name, step in (("coordinator", 2), ("redis", 7), ("trainer-0", 12)):
        async with real.unrecorded(run_id, step):
            await real.pause("coordinator")
        await real.until(run_id, Moment(step, RESULT))
        assert await real.moment(run_id) == Moment(step, RESULT)
        await real.kill(name)
        if name != "coordinator":
            assert await real.moment(run_id) == Moment(step, RESULT)
            await real.go_on("coordinator")
    async with real.unrecorded(run_id, 17):
        await real.kill("trainer-0")
    await assert_undisturbed(job, run_id)


async def test_pauses_longer_than_a_lease_change_nothing(job: Job) -> None:
    """SIGSTOP: a process that is missed, replaced where there is another one, and comes back."""
    run_id, real = "pause", job.real
    await real.start(run_id, job.values, held=True)
    for name, step in (("coordinator", 2), ("trainer-0", 8), ("reward-0", 12)):
        await real.reach(run_id, Moment(step, 1))
        await real.pause(name)
        await real.until_missed(name)
        await real.go_on(name)
    for step in (15, 18):
        name = await real.decoding(run_id, step)
        await real.pause(name)
        await real.until_missed(name)
        await real.go_on(name)
    await assert_undisturbed(job, run_id)


async def test_two_trainer_processes_train_every_draw_once_though_one_is_killed_amid_its_work(
    tmp_path: Path,
) -> None:
    """A rank that is lost ends all of them; the sums of the step are made again from its stream."""
    write_model(tmp_path / "model")
    values = proof_settings(
        tmp_path,
        120,
        tail_batching={"prompts_per_step": 20, "responses_per_prompt": 2},
        sampling={"max_response_tokens": 60},
    )
    summed = saving = 0
    async with running_stack(tmp_path, trainers=2) as real:
        for attempt in range(6):  # a run each: what lasts for a moment may go by unseen
            if summed and saving:
                break
            run_id = f"r-{attempt}"
            await real.start(run_id, values, held=True)
            if not summed:
                summed = await real.kill_rank_amid_sums(run_id, range(1, 3), rank=1)
            if not saving:
                saving = await real.kill_rank_amid_checkpoint(run_id, range(3, 6), rank=0)
            await real.succeeded(run_id)
            trace = await real.trace(run_id)
            superseded = await real.redis.llen(keys.superseded_steps(run_id))
            assert (len(trace.schedule), superseded) == (6, 0)
            assert Counter(trained_draws(trace)) == Counter(f"0:{row}" for row in range(1, 121))
    assert summed >= 2 * WINDOW_GROUPS
    assert saving
