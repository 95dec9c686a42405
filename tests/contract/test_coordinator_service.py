"""The coordinator over real gRPC and a real Redis server, with fake workers (fake_workers.py)."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollpacker.policy.events import ReplicaJoined
from rollpacker.round_log import read_round
from rollpacker.rpc.client import call, stream
from rollpacker.rpc.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from rollpacker.settings import RewardSettings, parse_run_settings
from rollpacker.store import keys
from rollpacker.store.draft_store import DraftStore
from rollpacker.store.records import RunState
from rollpacker.store.run_store import RunStore
from rollpacker.types import Draft, DrawId, GraderKind
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.reward_client import RewardClient
from tests.contract import fake_workers as fakes
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.contract.test_run_control import (
    ask,
    paused_at,
    paused_when,
    until_asked,
    until_idle,
)
from tests.tiny_run import run_settings, write_data

__all__ = ["cluster"]  # a fixture


def trained(schedule: list[tuple[str, list[tuple[str, tuple]]]]) -> Counter[str]:
    return Counter(draw for _, draws in schedule for draw, _ in draws)


async def undisturbed(cluster: Cluster, values: dict[str, Any]) -> list[Any]:
    """The schedule of the same run without faults; the trainer starts from nothing after it."""
    async with coordinator(cluster) as c:
        await c.start(values, run_id="undisturbed")
        await c.until_ended("undisturbed")
        schedule = await c.schedule("undisturbed")
    cluster.trainer.disk = fakes.TrainerDisk()
    cluster.trainer.restart()
    return schedule


async def test_a_run_trains_every_prompt_once_and_writes_its_outputs(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        started = await c.start(values)
        assert started.state == pb.Run.STATE_RUNNING
        assert started.planned_steps == 6
        run = await c.until_ended()
        schedule = await c.schedule()
    assert (run.step, run.weight_version, run.deferred_draw_count) == (6, 6, 0)
    assert trained(schedule) == Counter(f"0:{i}" for i in range(1, 25))
    kinds = {kind for kind, _ in schedule}
    assert "1/0" in kinds, "no short round: the ladder is not in use"
    directory = Path(run.run_directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["trained_groups"], summary["undrained"]) == (24, 0)
    assert (directory / "report.html").exists()


@pytest.mark.parametrize("mode", ["synchronous", "overlap", "paper", "exact"])
async def test_every_mode_trains_every_prompt_exactly_once(cluster: Cluster, mode: str) -> None:
    tail = {"mode": mode, "prompts_per_step": 4, "responses_per_prompt": 2}
    values = run_settings(cluster.directory, tail_batching=tail)
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        schedule = await c.schedule()
    assert trained(schedule) == Counter(f"0:{i}" for i in range(1, 25))


async def test_exact_and_synchronous_draw_the_same_seeds(cluster: Cluster) -> None:
    exact = await undisturbed(cluster, run_settings(cluster.directory))
    tail = {"mode": "synchronous"}
    synchronous = await undisturbed_as(
        cluster, "s", run_settings(cluster.directory, tail_batching=tail)
    )
    flat = [sorted(pair for _, draws in s for pair in draws) for s in (exact, synchronous)]
    assert flat[0] == flat[1]


async def undisturbed_as(cluster: Cluster, run_id: str, values: dict[str, Any]) -> list[Any]:
    async with coordinator(cluster) as c:
        await c.start(values, run_id=run_id)
        await c.until_ended(run_id)
        return await c.schedule(run_id)


@pytest.mark.parametrize("seed", range(6))
async def test_a_crash_at_any_point_changes_no_draw_seed_or_step(
    cluster: Cluster, seed: int
) -> None:
    values = run_settings(cluster.directory, prompts=80)
    expected = await undisturbed(cluster, values)
    rng = random.Random(seed)
    crashes = 0
    while True:
        async with coordinator(cluster) as c:
            run = await c.start(values)
            if run.state == pb.Run.STATE_SUCCEEDED or crashes == 25:
                await c.until_ended()
                assert await c.schedule() == expected
                run = await c.get()
                break
            await asyncio.sleep(rng.uniform(0.0, 0.08))
        crashes += 1
        if rng.random() < 0.4:
            cluster.trainer.restart()
        cluster.trainer.crash_after_update = int(rng.random() < 0.5)
        cluster.rollouts[rng.randrange(2)].fail_next = rng.randrange(3)
    assert crashes > 0
    lines = (Path(run.run_directory) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(20))


async def test_a_crash_between_finish_step_and_commit_commits_the_same_step(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = run_settings(cluster.directory)
    expected = await undisturbed(cluster, values)
    commit, blocked = RunStore.commit, asyncio.Event()

    async def crash_at_step_2(self: RunStore, fence: int, state: Any, record: Any) -> None:
        if record.step == 2:
            blocked.set()
            await asyncio.Event().wait()
        await commit(self, fence, state, record)

    monkeypatch.setattr(RunStore, "commit", crash_at_step_2)
    async with coordinator(cluster) as c:
        await c.start(values)
        async with asyncio.timeout(60):
            await blocked.wait()
    monkeypatch.setattr(RunStore, "commit", commit)
    assert 2 in cluster.trainer.disk.results
    async with coordinator(cluster) as c:
        await c.until_ended()
        assert await c.schedule() == expected


@pytest.mark.parametrize("kept", [0, 2])
async def test_a_lost_optimizer_rewinds_the_run_to_the_checkpoint_and_supersedes(
    cluster: Cluster, kept: int
) -> None:
    values = run_settings(cluster.directory, prompts=40)
    expected = await undisturbed(cluster, values)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 5)
    disk = cluster.trainer.disk
    for version in [v for v in disk.snapshots if v > kept]:
        del disk.snapshots[version]
        del disk.results[version - 1]
    async with coordinator(cluster) as c:
        await c.start(values)  # waits until the run is taken up
        await ask(c, "ResumeRun")
        await c.until_ended()
        assert await c.schedule() == expected
        assert (await c.runs.get("r")).data_digest
    assert await cluster.redis.llen(keys.superseded_steps("r")) >= 3


async def test_a_broken_stream_or_reward_costs_time_only(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    expected = await undisturbed(cluster, values)
    cluster.rollouts[0].fail_next = 3
    cluster.reward.unavailable = 5
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        assert await c.schedule() == expected
        steps = await c.steps()
    assert all(step.metrics["reward/none_count"] == 0 for step in steps)
    await until_idle(cluster)


async def test_responses_that_wait_for_a_slow_reward_service_change_nothing(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    expected = await undisturbed(cluster, values)
    cluster.reward.most_at_once = 0
    values["reward"] = {"max_concurrent_responses": 1}
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        assert await c.schedule() == expected
    assert cluster.reward.most_at_once == 1


async def test_while_rewards_do_not_keep_up_only_the_responses_of_complete_groups_are_scored(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory) | {"reward": {"max_concurrent_responses": 1}}
    tail = parse_run_settings(values).tail_batching
    launched = math.ceil(tail.resolved_speculation_factors[0] * tail.prompts_per_step)
    gate = cluster.reward.hold()
    async with coordinator(cluster) as c:
        run = await c.start(values, until_step=1)
        while True:  # until every group has all its responses, or has lost
            started = sum(rollout.group_count for rollout in cluster.rollouts)
            if started >= launched and not any(rollout.running for rollout in cluster.rollouts):
                break
            await asyncio.sleep(0.01)
        gate.set()
        while (await c.get()).state != pb.Run.STATE_PAUSED:
            await asyncio.sleep(0.01)
        trained = sum(len(step) for step in await samples(c, "r"))
    assert trained == tail.prompts_per_step * tail.responses_per_prompt
    assert trained <= cluster.reward.scored_count <= trained + 1  # one was there before all others
    log = Path(run.run_directory) / "rounds/step_000000.jsonl"
    logged = read_round(log.read_text().splitlines())
    assert set(logged.rewards.kinds) == {draw.id for draw in logged.arguments.draws}
    (kind,) = set(logged.rewards.kinds.values())
    speed = logged.rewards.speeds[kind]  # for the planner
    assert sum(speed.took.values()) == cluster.reward.scored_count
    waited = speed.waited  # one at a time, the others wait
    assert 0.8 * trained < waited.responses <= cluster.reward.scored_count
    assert waited.seconds > 0.0


async def test_reward_services_are_sent_about_twice_what_they_grade_at_once(
    cluster: Cluster,
) -> None:
    async with coordinator(cluster) as c:
        address, kind = cluster.addresses["reward-0"]
        rewards = RewardClient(c.workers, RewardSettings(), "r")
        assert rewards.room(GraderKind.CODE) == 0  # it has not told
        for name, slots, room, at_once in (
            ("reward-0", 2, 4, 64),
            ("reward-0", 40, 80, 80),
            ("reward-1", 20, 120, 120),
            ("reward-1", 0, 0, 0),
        ):
            request = pb.HeartbeatRequest(
                worker_id=name, address=address, kind=kind, reward_slot_count=slots
            )
            await call(lambda request=request: c.stub.Heartbeat(request))
            assert rewards.room(GraderKind.CODE) == room
            assert rewards.room(GraderKind.MATH) == at_once  # most is graded without a slot
            assert rewards.works_on(GraderKind.CODE) == room
            lavish = RewardClient(c.workers, RewardSettings(max_concurrent_responses=900), "r")
            assert lavish.room(GraderKind.CODE) == 900
            assert lavish.works_on(GraderKind.CODE) == (room or 900)
        limited = RewardClient(c.workers, RewardSettings(max_concurrent_responses=7), "r")
        assert limited.room(GraderKind.MATH) == limited.works_on(GraderKind.MATH) == 7
        request.reward_slot_count = -1
        with pytest.raises(InvalidArgumentError, match="reward_slot_count"):
            await call(lambda: c.stub.Heartbeat(request))


async def samples(c: Coordinator, run_id: str) -> list[list[tuple[int, ...]]]:
    """The tokens of every trained response, per step in the order of training."""
    found = []
    for step in await c.steps(run_id):
        request = pb.ListSamplesRequest(run_id=run_id, step=step.step)
        groups = (await call(lambda request=request: c.stub.ListSamples(request))).groups
        found.append([tuple(s.response.token_ids) for g in groups for s in g.responses])
    return found


async def trained_with(
    cluster: Cluster, run_id: str, **tail: Any
) -> tuple[list[Any], list[Any], list[pb.Step], int]:
    """Schedule, samples and steps of a whole run, and the tokens that its replicas decoded."""
    before = sum(rollout.decoded_tokens for rollout in cluster.rollouts)
    values = run_settings(cluster.directory, prompts=40)
    values["tail_batching"] = {**values.get("tail_batching", {}), **tail}
    async with coordinator(cluster) as c:
        await c.start(values, run_id=run_id)
        await c.until_ended(run_id)
        found = await c.schedule(run_id), await samples(c, run_id), await c.steps(run_id)
    cluster.trainer.disk = fakes.TrainerDisk()
    cluster.trainer.restart()
    return *found, sum(rollout.decoded_tokens for rollout in cluster.rollouts) - before


async def test_carry_over_saves_tokens_and_changes_no_draw_seed_step_or_response(
    cluster: Cluster,
) -> None:
    without = await trained_with(cluster, "without", carry_over_max_tokens=0)
    carried = await trained_with(cluster, "carried")
    assert carried[:2] == without[:2]
    assert carried[3] < without[3]
    assert sum(step.metrics["carry/draft_tokens"] for step in without[2]) == 0
    accepted = sum(step.metrics["carry/accepted_tokens"] for step in carried[2])
    drafted = sum(step.metrics["carry/draft_tokens"] for step in carried[2])
    assert 0 < accepted < drafted
    wastes = [found[2][-1].metrics["perf/waste"] for found in (carried, without)]
    assert 1 <= wastes[0] < wastes[1]
    assert await cluster.redis.keys("rollpacker:{carried}:deferred_draw:*") == []


async def test_drafts_that_are_wrong_or_lost_cost_time_only(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await trained_with(cluster, "expected", carry_over_max_tokens=0)
    rng = random.Random(1)

    async def garbage(_: DraftStore, draws: list[DrawId]) -> dict[DrawId, tuple[Draft, ...]]:
        return {
            draw: (Draft(rng.randrange(2), tuple(rng.choices(range(16), k=rng.randrange(60))), 0),)
            for draw in draws
            if rng.random() < 0.8
        }

    monkeypatch.setattr(DraftStore, "load", garbage)
    assert (await trained_with(cluster, "garbage"))[:2] == expected[:2]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_what_a_draining_replica_hands_back_goes_on_and_is_not_sampled_twice(
    cluster: Cluster, replicas: int
) -> None:
    for name in ("rollout-0", "rollout-1")[replicas:]:
        del cluster.addresses[name]
    expected = await trained_with(cluster, "expected")
    cluster.rollouts[0].drain_next = 9
    drained = await trained_with(cluster, "drained")
    assert drained[:2] == expected[:2]
    assert cluster.rollouts[0].drain_next == 0
    generated = [found[2][-1].metrics["perf/generated_tokens"] for found in (drained, expected)]
    assert generated[0] <= drained[3]
    trained_tokens = drained[2][-1].metrics["perf/trained_tokens"]
    assert generated[0] >= trained_tokens


async def test_idle_replicas_that_take_groups_over_change_no_draw_seed_step_or_response(
    cluster: Cluster,
) -> None:
    expected = await trained_with(cluster, "expected")
    cluster.rollouts[0].token_seconds = 0.01  # the other one is through long before
    moved = await trained_with(cluster, "moved", rebalance=True)
    assert moved[:2] == expected[:2]
    assert sum(step.metrics["rollout/moved_groups"] for step in moved[2]) > 0
    assert all(step.metrics["rollout/moved_groups"] == 0 for step in expected[2])


@pytest.mark.parametrize("rebalance", [None, False])
async def test_auto_moves_groups_unless_the_settings_say_otherwise(
    cluster: Cluster, rebalance: bool | None
) -> None:
    cluster.rollouts[0].token_seconds = 0.01  # the other one is through long before
    _, _, steps, _ = await trained_with(cluster, "auto", mode="auto", rebalance=rebalance)
    assert (sum(step.metrics["rollout/moved_groups"] for step in steps) > 0) == (rebalance is None)


async def test_what_a_broken_stream_told_with_logprobs_is_not_sampled_again(
    cluster: Cluster,
) -> None:
    """By engines that ignore drafts."""
    for rollout in cluster.rollouts:
        rollout.takes_drafts = False
    expected = await trained_with(cluster, "expected")
    assert sum(rollout.resumed_tokens for rollout in cluster.rollouts) == 0
    for rollout in cluster.rollouts:
        rollout.fail_next = 5
    broken = await trained_with(cluster, "broken")
    assert broken[:2] == expected[:2]
    assert sum(rollout.resumed_tokens for rollout in cluster.rollouts) > 0


async def test_a_replica_with_room_for_everything_leaves_the_others_their_share(
    cluster: Cluster,
) -> None:
    for rollout in cluster.rollouts:
        rollout.slots = 4096
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
    counts = [rollout.group_count for rollout in cluster.rollouts]
    assert min(counts) >= sum(counts) // 3


async def test_a_replica_of_another_weight_version_gets_no_work_until_it_serves(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    expected = await undisturbed(cluster, values)
    cluster.rollouts[0].forget_next = 5
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        assert await c.schedule() == expected
    assert cluster.rollouts[0].forget_next == 0


async def test_exact_is_refused_where_a_seed_means_nothing(cluster: Cluster) -> None:
    cluster.rollouts[1].replays = False
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory), run_id="exact")
        run = await c.until_ended("exact", succeeded=False)
        assert run.state == pb.Run.STATE_FAILED
        assert "rollout-1 (fake) does not replay by seed, which mode exact or auto" in run.failure
        paper = {"mode": "paper", "prompts_per_step": 4, "responses_per_prompt": 2}
        await c.start(run_settings(cluster.directory, tail_batching=paper), run_id="paper")
        await c.until_ended("paper")


async def test_preemptions_decide_the_tensor_parallel_size(cluster: Cluster) -> None:
    """The fakes preempt ever more at size 1 and never at 2: it doubles, and halves later."""
    tail = {"mode": "synchronous", "prompts_per_step": 2}
    expected = await undisturbed(cluster, run_settings(cluster.directory, tail_batching=tail))
    assert set(cluster.rollouts[0].sizes) == {0}
    tail["max_tensor_parallel_size"] = 4
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, tail_batching=tail))
        run = await c.until_ended()
        assert await c.schedule() == expected
    lines = (Path(run.run_directory) / "metrics.jsonl").read_text().splitlines()
    sizes = [json.loads(line)["rollout/tensor_parallel_size"] for line in lines]
    assert sizes[:7] == [1, 1, 2, 2, 2, 2, 1]


async def test_each_level_has_the_size_that_the_settings_give_it(cluster: Cluster) -> None:
    """One replica finds devices for the larger one; the other one's share is not kept waiting."""
    expected = await undisturbed(cluster, run_settings(cluster.directory))
    values = run_settings(cluster.directory)
    values["tail_batching"]["tensor_parallel_sizes"] = [1, 2]
    cluster.rollouts[1].largest_size = 1
    for replica in cluster.rollouts:
        replica.slots = 64
    async with coordinator(cluster) as c:
        await c.start(values)
        run = await c.until_ended()
        assert await c.schedule() == expected
        steps = await c.steps()
    sizes = [1 if step.level == 0 else 2 for step in steps]
    assert [step.metrics["rollout/tensor_parallel_size"] for step in steps] == sizes
    assert set(sizes) == {1, 2}
    for step in steps:
        log = Path(run.run_directory) / f"rounds/step_{step.step:06d}.jsonl"
        logged = read_round(log.read_text().splitlines())
        joined = [item.event for item in logged.handled if isinstance(item.event, ReplicaJoined)]
        assert {event.weight_kv_tokens for event in joined} == {fakes.WEIGHT_KV_TOKENS}
        responses = len(logged.arguments.draws) * logged.arguments.plan.response_count
        if step.level:
            assert [event.response_capacity for event in joined] == [min(64, responses)]


async def test_a_size_is_not_planned_for_engines_that_keep_theirs(cluster: Cluster) -> None:
    cluster.rollouts[0].resizes = False
    values = run_settings(cluster.directory)
    values["tail_batching"]["max_tensor_parallel_size"] = 2
    async with coordinator(cluster) as c:
        await c.start(values)
        run = await c.until_ended(succeeded=False)
    assert run.state == pb.Run.STATE_FAILED
    assert "rollout-0 (fake) cannot change its tensor-parallel size" in run.failure


async def test_a_stopped_run_goes_on_where_it_was(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=40)
    expected = await undisturbed(cluster, values)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
        gate = cluster.reward.hold()
        await ask(c, "ResumeRun")
        await until_asked(cluster)
        await c.stop(pb.STOP_MODE_AFTER_STEP)
        gate.set()
        run = await c.until_ended(succeeded=False)
        assert (run.state, run.step) == (pb.Run.STATE_STOPPED, 3)
        gate = cluster.reward.hold()
        await c.start(values)
        await until_asked(cluster)
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        gate.set()
        run = await c.get()
        assert (run.state, run.step) == (pb.Run.STATE_STOPPED, 3)
        await c.start(values)
        await c.until_ended()
        assert await c.schedule() == expected


async def test_a_run_of_another_layout_is_refused_with_the_reason_and_stops_nobody_else(
    cluster: Cluster,
) -> None:
    """A new version starts although an old one left a run open, and drives its own."""
    values = run_settings(cluster.directory)
    key = keys.state("old")
    async with coordinator(cluster) as c:
        await c.start(values, run_id="old")
        await c.stop(pb.STOP_MODE_IMMEDIATELY, run_id="old")
    text = json.loads(await cluster.redis.hget(key, "state"))
    old = {"state": json.dumps({**text, "layout_version": 0}), "status": "running"}
    await cluster.redis.hset(key, mapping=old)
    cluster.trainer.restart()
    async with coordinator(cluster) as c:
        with pytest.raises(
            FailedPreconditionError, match="layout 0, this version reads"
        ) as refused:
            await c.get("old")
        assert refused.value.reason == "LAYOUT"
        with pytest.raises(FailedPreconditionError, match="finish the run with the version that"):
            await c.start(values, run_id="old")
        await c.start(values)
        await c.until_ended()
        listed = await call(lambda: c.stub.ListRuns(pb.ListRunsRequest()))
        assert [run.run_id for run in listed.runs] == ["r"]
    assert json.loads(await cluster.redis.hget(key, "state"))["layout_version"] == 0


async def test_stopping_with_drain_trains_the_queue_and_draws_nothing_new(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=400)
    async with coordinator(cluster) as c:
        await paused_when(cluster, c, values, bool)
        gate = cluster.reward.hold()
        await ask(c, "ResumeRun")
        await until_asked(cluster)
        await c.stop(pb.STOP_MODE_DRAIN)
        gate.set()
        run = await c.until_ended(succeeded=False)
        schedule = await c.schedule()
    assert (run.state, run.deferred_draw_count) == (pb.Run.STATE_STOPPED, 0)
    assert len(trained(schedule)) < 400
    assert max(trained(schedule).values()) == 1


async def test_max_steps_ends_with_an_empty_queue(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=400, max_steps=7)
    async with coordinator(cluster) as c:
        await c.start(values)
        run = await c.until_ended()
        schedule = await c.schedule()
    assert (run.step, run.deferred_draw_count, run.planned_steps) == (7, 0, 7)
    assert len(trained(schedule)) == 28


@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_data_set_smaller_than_a_step_finishes(cluster: Cluster, prompts: int) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory, prompts=prompts))
        run = await c.until_ended()
        schedule = await c.schedule()
    assert run.step == 1
    assert len(trained(schedule)) == prompts


async def test_a_prompt_may_be_drawn_again_while_it_is_queued_from_the_epoch_before(
    cluster: Cluster,
) -> None:
    path = cluster.directory / "train.jsonl"
    values = run_settings(cluster.directory, prompts=6, data={"path": str(path), "epochs": 5})
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        schedule = await c.schedule()
    assert trained(schedule) == Counter(f"{e}:{i}" for e in range(5) for i in range(1, 7))


async def test_duplicate_texts_are_two_draws(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    write_data(cluster.directory / "train.jsonl", 24, text="1+1=")
    async with coordinator(cluster) as c:
        await c.start(values)
        await c.until_ended()
        schedule = await c.schedule()
    assert trained(schedule) == Counter(f"0:{i}" for i in range(1, 25))


async def test_a_run_that_is_older_than_a_setting_is_not_another_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = RunStore.create

    async def create_as_before(self: RunStore, state: RunState) -> None:
        settings = {k: v for k, v in state.settings.items() if k != "placement"}
        await create(self, replace(state, settings=settings))

    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        monkeypatch.setattr(RunStore, "create", create_as_before)
        assert "placement" not in (await c.start(values)).settings
        assert (await c.start(values)).run_id == "r"
        with pytest.raises(AlreadyExistsError, match=r"placement"):
            await c.start({**values, "placement": "colocated"})
        await c.until_ended()


@pytest.mark.parametrize("mode", ["exact", "auto"])
async def test_a_setting_that_the_mode_fills_in_may_be_left_out_or_said(
    cluster: Cluster, mode: str
) -> None:
    values = run_settings(cluster.directory)
    values["tail_batching"]["mode"] = mode
    said = {**values, "tail_batching": {**values["tail_batching"], "rebalance": mode == "auto"}}
    other = {**values, "tail_batching": {**values["tail_batching"], "rebalance": mode != "auto"}}
    async with coordinator(cluster) as c:
        await c.start(said)
        assert (await c.start(values)).run_id == "r"
        with pytest.raises(AlreadyExistsError, match=r"rebalance"):
            await c.start(other)
        await c.until_ended()


async def test_starting_again_returns_the_run_and_other_settings_are_refused(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await c.start(values)
        assert (await c.start(values)).run_id == "r"
        with pytest.raises(AlreadyExistsError, match=r"seed") as caught:
            await c.start({**values, "seed": 8})
        assert caught.value.reason == "SETTINGS_DIFFER"
        with pytest.raises(FailedPreconditionError) as active:
            await c.start(values, run_id="other")
        assert active.value.reason == "RUN_ACTIVE"
        await c.until_ended()
        assert (await c.start(values)).state == pb.Run.STATE_SUCCEEDED


async def test_wrong_settings_name_field_value_and_fix(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        with pytest.raises(InvalidArgumentError) as caught:
            await c.start({**values, "trainer": {"learning_rte": 1, "clip_low": -1}})
        fields = dict(caught.value.violations)
        assert "did you mean `learning_rate`" in fields["settings.trainer.learning_rte"]
        assert "got -1" in fields["settings.trainer.clip_low"]
        with pytest.raises(InvalidArgumentError, match="nowhere"):
            await c.start({**values, "data": {"path": "/nowhere.jsonl"}})
        with pytest.raises(InvalidArgumentError, match="run_id"):
            await c.start(values, run_id="No Spaces!")
        with pytest.raises(NotFoundError):
            await c.get()


async def test_validate_only_starts_nothing(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        run = await c.start(run_settings(cluster.directory), validate_only=True)
        assert run.planned_steps == 6
        with pytest.raises(NotFoundError):
            await c.get()


async def test_watching_resumes_without_gap_or_repeat(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await c.start(values)
        first = await watch(c, stop_after=3)
        rest = await watch(c, after=first[-1].revision)
        whole = await watch(c)
    kept = [e for e in [*first, *rest] if not e.HasField("round_progress")]
    everything = [e for e in whole if not e.HasField("round_progress")]
    assert [e.revision for e in kept] == [e.revision for e in everything]
    finished = [e.step_finished.step for e in everything if e.HasField("step_finished")]
    assert finished == list(range(6))
    assert everything[-1].run_changed.state == pb.Run.STATE_SUCCEEDED


async def watch(
    c: Coordinator, after: str = "", stop_after: int | None = None
) -> list[pb.WatchRunResponse]:
    request = pb.WatchRunRequest(run_id="r", after_revision=after)
    events, kept = [], 0
    async for event in stream(lambda: c.stub.WatchRun(request, timeout=60)):
        events.append(event)
        kept += not event.HasField("round_progress")
        if kept == stop_after:
            break
    return events


async def test_a_compacted_revision_is_out_of_range(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        await cluster.redis.xtrim(keys.events("r"), maxlen=1, approximate=False)
        with pytest.raises(OutOfRangeError) as caught:
            await watch(c, after="1-0")
        assert caught.value.reason == "REVISION_COMPACTED"
        for bad in ("nonsense", "²-0", "9" * 5000 + "-0", f"0-{1 << 64}"):
            with pytest.raises(InvalidArgumentError, match="after_revision"):
                await watch(c, after=bad)


async def test_steps_are_paged_newest_first(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        request = pb.ListStepsRequest(run_id="r", page_size=4)
        page = await call(lambda: c.stub.ListSteps(request))
        assert [step.step for step in page.steps] == [5, 4, 3, 2]
        request.page_token = page.next_page_token
        page = await call(lambda: c.stub.ListSteps(request))
        assert [step.step for step in page.steps] == [1, 0]
        assert page.next_page_token == ""
        for bad in (
            {"page_size": -1},
            {"page_size": 1001},
            {"page_token": "x"},
            {"page_token": "9" * 5000},
        ):
            wrong = pb.ListStepsRequest(run_id="r", **bad)
            with pytest.raises(InvalidArgumentError):
                await call(lambda wrong=wrong: c.stub.ListSteps(wrong))


async def test_samples_hold_every_trained_response(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        request = pb.ListSamplesRequest(run_id="r", step=3)
        groups = (await call(lambda: c.stub.ListSamples(request))).groups
        steps = await c.steps()
        assert [g.draw.prompt_id for g in groups] == [d.prompt_id for d in steps[3].draws]
        for group in groups:
            assert [s.response.seed for s in group.responses] == list(group.draw.seeds)
            assert {s.response.weight_version for s in group.responses} == {3}
        with pytest.raises(NotFoundError):
            await call(lambda: c.stub.ListSamples(pb.ListSamplesRequest(run_id="r", step=99)))


async def test_workers_are_listed_until_their_lease_ends(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        listed = await call(lambda: c.stub.ListWorkers(pb.ListWorkersRequest()))
        names = [worker.worker_id for worker in listed.workers]
        assert names == ["rollout-0", "rollout-1", "reward-0", "trainer-0"]
        for bad in ({}, {"worker_id": "x"}, {"worker_id": "x", "address": "y"}):
            request = pb.HeartbeatRequest(**bad)
            with pytest.raises(InvalidArgumentError):
                await call(lambda request=request: c.stub.Heartbeat(request))


async def test_a_missing_kind_of_worker_fails_the_run_with_its_name(cluster: Cluster) -> None:
    async with coordinator(cluster, register=False) as c:
        c.workers.wait_seconds = 0.2
        await c.start(run_settings(cluster.directory))
        run = await c.until_ended(succeeded=False)
        assert run.state == pb.Run.STATE_FAILED
        assert "no trainer worker" in run.failure


async def test_a_round_without_a_rollout_worker_fails_with_its_name(cluster: Cluster) -> None:
    for name in ("rollout-0", "rollout-1"):
        del cluster.addresses[name]
    async with coordinator(cluster) as c:
        c.workers.wait_seconds = 0.2
        await c.start(run_settings(cluster.directory))
        run = await c.until_ended(succeeded=False)
    assert run.state == pb.Run.STATE_FAILED
    assert "no rollout worker is there" in run.failure


async def test_a_draw_that_loses_replica_after_replica_ends_the_run_with_its_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.coordinator.group_streams._MAX_LOSSES", 2)
    for rollout in cluster.rollouts:
        rollout.fail_next = 10_000
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        run = await c.until_ended(succeeded=False)
    assert run.state == pb.Run.STATE_FAILED
    assert "replicas were lost while they ran draw 0:" in run.failure


async def test_a_score_is_asked_again_where_its_service_has_moved_to(cluster: Cluster) -> None:
    held = cluster.reward.hold()  # for good: only the new address answers
    moved = fakes.FakeReward()
    server = fakes.reward_server(moved)
    await server.start()
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await until_asked(cluster)
        request = pb.HeartbeatRequest(
            worker_id="reward-0", address=server.address, kind=pb.WORKER_KIND_REWARD
        )
        await c.stub.Heartbeat(request)
        await c.until_ended()
        steps = await c.steps()
    held.set()
    await server.stop()
    assert all(step.metrics["reward/none_count"] == 0 for step in steps)


async def test_a_standby_takes_over_when_the_lease_is_free_and_a_stale_one_steps_down(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=200)
    expected = await undisturbed(cluster, values)
    async with coordinator(cluster) as first, coordinator(cluster, "standby") as second:
        gate = cluster.reward.hold()
        await first.start(values)
        with pytest.raises(Exception, match="stands by"):
            await second.start(values, run_id="other")
        await until_asked(cluster)
        lease = first.runs._leadership.lease
        lease.renew = lambda fence: asyncio.sleep(0, result=True)  # paused past it
        await cluster.redis.delete(keys.COORDINATOR_LEASE)
        while not second.runs.holds_lease:
            await asyncio.sleep(0.005)
        gate.set()
        await second.until_ended()
        assert await second.schedule() == expected


async def test_held_out_prompts_are_measured_before_and_after(cluster: Cluster) -> None:
    write_data(cluster.directory / "validation.jsonl", 5)
    path = cluster.directory / "train.jsonl"
    values = run_settings(
        cluster.directory,
        data={"path": str(path), "validation_path": str(cluster.directory / "validation.jsonl")},
        validation={"interval": 2},
    )
    async with coordinator(cluster) as c:
        await c.start(values)
        run = await c.until_ended()
    lines = (Path(run.run_directory) / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 4, 6]
