"""Pausing, changing and queueing runs, over real gRPC and a real Redis server (fake workers)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from rollpacker.data.run_data import RunData
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from rollpacker.settings import RunSettings
from rollpacker.store import keys
from rollpacker.store.records import RunState
from rollpacker.store.run_store import RunStore
from rollpacker.tasks import end_tasks
from rollpacker.types import PromptGroup
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2
from services.coordinator import runs
from services.coordinator.command_runner import CommandRunner
from services.coordinator.runs import Runs
from tests.contract import fake_workers as fakes
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.tiny_run import run_settings, write_data

__all__ = ["cluster"]  # a fixture
PAUSED, RUNNING = pb.Run.STATE_PAUSED, pb.Run.STATE_RUNNING


async def ask(c: Coordinator, method: str, **fields: Any) -> Any:
    """One call about run r."""
    request = getattr(pb, f"{method}Request")(**{"run_id": "r", **fields})
    return await call(lambda: getattr(c.stub, method)(request, timeout=60))


async def update(c: Coordinator, **settings: Any) -> pb.Run:
    struct = Struct()
    struct.update(settings)
    return (await ask(c, "UpdateRun", settings=struct)).run


async def until(c: Coordinator, state: int, run_id: str = "r") -> pb.Run:
    async with asyncio.timeout(60):
        while (run := await c.get(run_id)).state != state:
            assert run.state != pb.Run.STATE_FAILED, run.failure
            await asyncio.sleep(0.005)
    return run


async def paused_at(cluster: Cluster, c: Coordinator, values: dict[str, Any], step: int) -> pb.Run:
    """Start run r and let it pause when so many steps are committed."""
    await c.start(values, until_step=step)
    return await until(c, PAUSED)


async def until_asked(cluster: Cluster) -> None:
    """Wait until a score was asked for since `hold`: the run is amid a round, which cannot end."""
    async with asyncio.timeout(60):
        await cluster.reward.asked.wait()


async def until_idle(cluster: Cluster) -> None:
    """Wait until every replica has heard that its streams were given up."""
    async with asyncio.timeout(60):
        while any(rollout.running for rollout in cluster.rollouts):
            await asyncio.sleep(0.005)


async def paused_when(
    cluster: Cluster,
    c: Coordinator,
    values: dict[str, Any],
    holds: Callable[[Sequence[types_pb2.Draw]], bool],
) -> pb.Run:
    """Start run r and let it go step by step to where something holds for its deferred draws."""
    run = await paused_at(cluster, c, values, 1)
    while not holds((await ask(c, "ListDeferredDraws")).draws):
        await ask(c, "ResumeRun", until_step=run.step + 1)
        run = await until(c, PAUSED)
    return run


async def whole(cluster: Cluster, values: dict[str, Any]) -> list[Any]:
    """The schedule of the same run without any wish; the trainer starts from nothing after it."""
    async with coordinator(cluster) as c:
        await c.start(values, run_id="whole")
        await c.until_ended("whole")
        schedule = await c.schedule("whole")
    start_over(cluster)
    return schedule


def start_over(cluster: Cluster) -> None:
    cluster.trainer.disk = fakes.TrainerDisk()
    cluster.trainer.restart()


def rows(*names: str, **more: Any) -> list[Struct]:
    found = []
    for name in names:
        row = Struct()
        row.update({"prompt": "1+1=", "answer": "2", "prompt_id": name, **more})
        found.append(row)
    return found


# Pausing


async def test_a_run_that_is_started_until_a_step_pauses_there_though_its_coordinator_dies(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        with pytest.raises(InvalidArgumentError) as caught:
            await c.start(values, until_step=-1)
        assert dict(caught.value.violations) == {"until_step": "-1 is below 0"}
        gate = cluster.reward.hold()
        assert (await c.start(values, until_step=2)).pause_at_step == 2
        assert (await c.start(values, until_step=3)).pause_at_step == 2  # it is active
    gate.set()
    async with coordinator(cluster) as c:
        assert (await until(c, PAUSED)).step == 2
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        await c.start(values, until_step=4)
        assert (await until(c, PAUSED)).step == 4
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        await c.start(values, until_step=4)  # which it has come to
        assert (await until(c, PAUSED)).step == 4
        await ask(c, "ResumeRun")
        assert (await c.until_ended()).step == 6


@pytest.mark.parametrize("queue", [False, True])
async def test_until_step_stands_from_the_first_write_of_a_run_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    """The coordinator dies between that and the run's first status."""
    values = run_settings(cluster.directory, prompts=24)
    set_status, stuck = RunStore.set_status, asyncio.Event()

    async def hang(self: RunStore, fence: int, status: str, **fields: Any) -> bool:
        if self.run_id == "x":
            stuck.set()
            await asyncio.Event().wait()
        return await set_status(self, fence, status, **fields)

    async with coordinator(cluster) as c:
        if queue:
            await paused_at(cluster, c, values, 1)
        monkeypatch.setattr(RunStore, "set_status", hang)
        asked = asyncio.create_task(c.start(values, run_id="x", queue=queue, until_step=2))
        await stuck.wait()
        await end_tasks(asked)
    monkeypatch.setattr(RunStore, "set_status", set_status)
    async with coordinator(cluster) as c:
        if queue:
            await until(c, PAUSED)
            await c.stop(pb.STOP_MODE_IMMEDIATELY)
            start_over(cluster)
        assert (await until(c, PAUSED, "x")).step == 2


async def test_a_run_goes_step_by_step_and_trains_what_it_would_without(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=40)
    expected = await whole(cluster, values)
    async with coordinator(cluster) as c:
        run = await paused_at(cluster, c, values, 1)
        assert (run.step, run.pause_at_step) == (1, 0)
        again = (await ask(c, "ResumeRun", until_step=1)).run
        assert (again.state, again.step) == (PAUSED, 1)
        await ask(c, "ResumeRun", until_step=3)
        assert (await until(c, PAUSED)).step == 3
        await ask(c, "ResumeRun")
        await c.until_ended()
        assert await c.schedule() == expected


@pytest.mark.parametrize("mode", [pb.PAUSE_MODE_AFTER_STEP, pb.PAUSE_MODE_IMMEDIATELY])
async def test_a_run_pauses_any_number_of_times_and_trains_the_same(
    cluster: Cluster, mode: pb.PauseMode.ValueType
) -> None:
    values = run_settings(cluster.directory, prompts=200)
    expected = await whole(cluster, values)
    async with coordinator(cluster) as c:
        run = await paused_at(cluster, c, values, 1)
        for pause in range(8):
            await ask(c, "ResumeRun", until_step=run.step + 5)  # of 50: it is not over meanwhile
            await asyncio.sleep(0.02 * pause)
            await ask(c, "PauseRun", mode=mode)
            run = await until(c, PAUSED)
            await until_idle(cluster)
        await ask(c, "ResumeRun")
        await c.until_ended()
        assert await c.schedule() == expected


async def test_a_paused_run_stays_paused_over_a_crash_and_goes_on_when_told(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=40)
    expected = await whole(cluster, values)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
    async with coordinator(cluster) as c:
        assert (await c.start(values)).state == PAUSED
        with pytest.raises(FailedPreconditionError, match="active"):
            await c.start(values, run_id="other")
        await ask(c, "ResumeRun", until_step=4)
    async with coordinator(cluster) as c:  # the wish for step 4 is durable
        run = await until(c, PAUSED)
        assert run.step == 4
        await ask(c, "ResumeRun")
        await c.until_ended()
        assert await c.schedule() == expected


async def test_a_paused_run_stays_paused_where_its_files_cannot_be_read(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    model, away = cluster.directory / "model", cluster.directory / "away"
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
    model.rename(away)
    async with coordinator(cluster) as c:
        await c.runs._scanned.wait()
        assert ((await c.get()).state, c.runs.active_run_id) == (PAUSED, "")
        away.rename(model)
        await c.start(values)
        await c.until_ended()


async def test_a_paused_run_stops_without_its_trainer(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
    async with coordinator(cluster, register=False) as c:
        await until(c, PAUSED)
        await c.stop(pb.STOP_MODE_AFTER_STEP)
        assert (await until(c, pb.Run.STATE_STOPPED)).step == 1


@pytest.mark.parametrize("mode", [pb.STOP_MODE_AFTER_STEP, pb.STOP_MODE_IMMEDIATELY])
async def test_a_wish_that_comes_while_a_run_is_taken_up_reaches_its_driver(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, mode: pb.StopMode.ValueType
) -> None:
    """Between its driver's reading of the wishes in Redis, and its first step."""
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
    is_loaded, is_read, is_told = threading.Event(), asyncio.Event(), asyncio.Event()
    load_data, get = runs.load_data, Runs.get

    def loaded(settings: RunSettings) -> RunData:
        data = load_data(settings)
        is_loaded.set()
        return data

    async def read_just_before_the_wish(self: Runs, run_id: str) -> RunState:
        state = await get(self, run_id)
        if is_loaded.is_set() and not is_read.is_set():
            is_read.set()
            with suppress(TimeoutError):  # it may have to wait, but does not come to nothing
                await asyncio.wait_for(is_told.wait(), 1)
        return state

    monkeypatch.setattr(runs, "load_data", loaded)
    monkeypatch.setattr(Runs, "get", read_just_before_the_wish)
    async with coordinator(cluster, register=False) as c:
        await is_read.wait()
        stopped = await c.stop(mode)
        is_told.set()
        assert mode != pb.STOP_MODE_IMMEDIATELY or stopped.state == pb.Run.STATE_STOPPED
        assert (await until(c, pb.Run.STATE_STOPPED)).step == 1


async def test_a_run_pauses_and_stops_at_once_while_its_trainer_hangs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.coordinator.driver._ABANDON_SECONDS", 0.1)
    async with coordinator(cluster) as c:
        gate = cluster.reward.hold()
        await c.start(run_settings(cluster.directory))
        await until_asked(cluster)
        cluster.trainer.abandons.clear()
        paused = (await ask(c, "PauseRun", mode=pb.PAUSE_MODE_IMMEDIATELY)).run
        assert paused.state == PAUSED
        stopped = await c.stop(pb.STOP_MODE_IMMEDIATELY)
        assert stopped.state == pb.Run.STATE_STOPPED
    gate.set()
    cluster.trainer.abandons.set()


async def test_what_is_asked_of_a_run_that_is_not_active_is_refused(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        with pytest.raises(NotFoundError):
            await ask(c, "PauseRun")
        await c.start(values)
        await c.until_ended()
        for method in ("PauseRun", "ResumeRun", "SaveCheckpoint"):
            with pytest.raises(FailedPreconditionError) as caught:
                await ask(c, method)
            assert caught.value.reason == "RUN_NOT_ACTIVE"
        with pytest.raises(FailedPreconditionError) as caught:
            await update(c, trainer={"learning_rate": 0})
        assert caught.value.reason == "RUN_ENDED"


async def test_a_coordinator_that_was_replaced_changes_nothing(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
        await cluster.redis.hset(keys.state("r"), "fence", 10_000)
        before = await cluster.redis.hgetall(keys.state("r"))
        for method, fields in (
            ("ResumeRun", {}),
            ("StopRun", {}),
            ("AddPrompts", {"rows": rows("new")}),
            ("UpdateRun", {"settings": rows("x")[0]}),
        ):
            if method == "UpdateRun":
                with pytest.raises(UnavailableError):
                    await update(c, trainer={"learning_rate": 0})
            else:
                with pytest.raises(UnavailableError) as caught:
                    await ask(c, method, **fields)
                assert caught.value.reason == "STANDBY"
        assert await cluster.redis.hgetall(keys.state("r")) == before
        assert await cluster.redis.exists(keys.changes("r"), keys.added_prompts("r")) == 0


# Changing settings


async def test_a_learning_rate_holds_from_the_next_round_on_and_over_a_crash(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=24)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
        run = await update(c, trainer={"learning_rate": 0.25})
        assert run.pending_change_count == 1
        assert (await c.start(values)).run_id == "r"  # with its own settings it is the same run
    cluster.trainer.restart()
    async with coordinator(cluster) as c:
        await until(c, PAUSED)
        await ask(c, "ResumeRun")
        run = await c.until_ended()
    assert [rate for rate, _ in cluster.trainer.values.values()] == [1e-3] * 2 + [0.25] * 4
    assert run.updated_settings["trainer"]["learning_rate"] == 0.25
    assert run.settings["trainer"]["learning_rate"] == 1e-3
    assert run.pending_change_count == 0


async def test_a_change_in_the_middle_of_a_round_leaves_that_round_alone(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=24)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        gate = cluster.reward.hold()
        await ask(c, "ResumeRun")
        await until_asked(cluster)
        await update(c, trainer={"learning_rate": 0.5})
    gate.set()  # the coordinator has died in the round; the next one repeats it as it began
    async with coordinator(cluster) as c:
        await c.until_ended()
    assert [rate for rate, _ in cluster.trainer.values.values()] == [1e-3] * 2 + [0.5] * 4


async def test_deferred_draws_keep_the_parameters_that_they_were_first_drawn_with(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=80)
    async with coordinator(cluster) as c:
        paused = await paused_when(cluster, c, values, lambda draws: len(draws) >= 4)
        await update(c, sampling={"temperature": 0.5, "max_response_tokens": 60})
        await ask(c, "ResumeRun", until_step=paused.step + 1)
        waiting = await until(c, PAUSED)
        if waiting.deferred_draw_count:
            assert waiting.waiting_settings["sampling"]["temperature"] == 0.5
        await ask(c, "ResumeRun")
        run = await c.until_ended()
        schedule = await c.schedule()
    parameters: dict[str, set[tuple[float, int]]] = {}
    for rollout in cluster.rollouts:
        for _, prompt_id, temperature, cap in rollout.sampled:
            parameters.setdefault(prompt_id, set()).add((temperature, cap))
    assert {len(seen) for seen in parameters.values()} == {1}
    assert {seen for found in parameters.values() for seen in found} == {(1.0, 40), (0.5, 60)}
    by_step = {step: temperature for step, (_, temperature) in cluster.trainer.values.items()}
    for step, (_, draws) in enumerate(schedule):
        of_draws = {parameters[name.partition(":")[2]].copy().pop()[0] for name, _ in draws}
        assert of_draws == {by_step[step]}
    assert not run.waiting_settings.fields
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    assert trained == Counter(f"0:{i}" for i in range(1, 81))


async def test_draws_above_a_lowered_level_move_down_to_it(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=400)
    async with coordinator(cluster) as c:
        paused = await paused_when(
            cluster, c, values, lambda draws: any(draw.level == 2 for draw in draws)
        )
        tail = {"deferral_levels": 1, "speculation_factors": [1.5]}
        await update(c, tail_batching=tail)
        step = paused.step
        await ask(c, "ResumeRun", until_step=step + 2)
        await until(c, PAUSED)
        levels = {draw.level for draw in (await ask(c, "ListDeferredDraws")).draws}
        assert levels <= {1}
        await ask(c, "ResumeRun")
        await c.until_ended()
        schedule = await c.schedule()
    kinds = [kind for kind, _ in schedule]
    assert "1/1" not in kinds[step + 2 :]  # level 1 is the last one now: its rounds are long
    assert len({name for _, draws in schedule for name, _ in draws}) == 400


async def test_wrong_changes_name_field_and_fix_and_lose_nothing(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
        for settings, named, fix in (
            ({"seed": 8}, "seed", "may not be changed"),
            ({"trainer": {"clip_low": 0.1}}, "trainer.clip_low", "trainer.learning_rate"),
            ({"trainer": {"learning_rate": -1}}, "trainer.learning_rate", "got -1"),
            ({"tail_batching": {"speculation_factors": [3.0]}}, "tail_batching", "not in (1, 2]"),
            ({}, "settings", "is empty"),
            ({"trainer": {}}, "settings", "is empty"),
            ({"max_steps": 1}, "max_steps", "stop --drain"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                await update(c, **settings)
            fields = dict(caught.value.violations)
            assert f"settings.{named}" in fields
            assert fix in fields[f"settings.{named}"]
        with pytest.raises(InvalidArgumentError, match="settings: holds NaN or an infinity"):
            await update(c, trainer={"learning_rate": float("inf")})
        with pytest.raises(InvalidArgumentError, match="settings: holds NaN or an infinity"):
            await c.start({"seed": float("nan")}, run_id="other")
        assert (await c.get()).pending_change_count == 0


async def test_a_round_that_is_over_leaves_nothing_for_the_garbage_collector(
    cluster: Cluster,
) -> None:
    gc.collect()
    gc.disable()
    try:
        async with coordinator(cluster) as c:
            await paused_at(cluster, c, run_settings(cluster.directory), 3)
            left = [type(o) for o in gc.get_objects() if type(o) in (CommandRunner, PromptGroup)]
    finally:
        gc.enable()
    assert left == []


async def test_a_cap_that_a_replica_could_not_serve_is_refused_while_the_run_is_active(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        name = next(iter(cluster.addresses))
        address, kind = cluster.addresses[name]
        limits = {"context_tokens": 80, "kv_budget_tokens": 64}
        await c.stub.Heartbeat(
            pb.HeartbeatRequest(worker_id=name, address=address, kind=kind, engine_stats=limits)
        )
        driver = c.runs.active("r")
        assert driver is not None
        assert driver.driver is not None
        longest, limit, replica = driver.driver.lengths()
        assert (limit, replica) == (64, name)
        for too_long in (64, 64 - longest + 1):
            with pytest.raises(InvalidArgumentError) as caught:
                await update(c, sampling={"max_response_tokens": too_long})
            problem = dict(caught.value.violations)["settings.sampling.max_response_tokens"]
            assert f"{too_long} and" in problem
            assert f"give {64 - longest} at most" in problem
        assert (await c.get()).pending_change_count == 0
        run = await update(c, sampling={"max_response_tokens": 64 - longest})
        assert run.pending_change_count == 1


async def test_a_new_run_with_a_cap_that_the_model_or_a_replica_does_not_take_is_refused(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    model = {"max_position_embeddings": 44, "eos_token_id": 16}
    (cluster.directory / "model" / "config.json").write_text(json.dumps(model))
    name = next(iter(cluster.addresses))
    address, kind = cluster.addresses[name]
    beat = pb.HeartbeatRequest(worker_id=name, address=address, kind=kind)
    limits = {
        "the model takes 44: give 39 at most": {"context_tokens": 20},  # of another model
        f"{name} takes 43: give 38 at most, or raise its limit": {"max_context_tokens": 43},
        f"{name} takes 3: leave long prompts out (data.max_prompt_tokens)": {"kv_budget_tokens": 3},
    }
    async with coordinator(cluster) as c:
        for fix, stats in limits.items():
            beat.ClearField("engine_stats")
            for field, value in stats.items():
                setattr(beat.engine_stats, field, value)
            await c.stub.Heartbeat(beat)
            with pytest.raises(InvalidArgumentError) as caught:
                await c.start(values)
            problem = dict(caught.value.violations)["settings.sampling.max_response_tokens"]
            assert "40 and the longest prompt of 5 tokens make 45; " in problem
            assert fix in problem
        with pytest.raises(NotFoundError):  # so its name is free
            await c.get()


async def test_a_step_that_failed_by_a_setting_begins_anew_with_the_next_value(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=24)
    for rollout in cluster.rollouts:
        rollout.context_tokens = 64  # at a cap of 60, prompts of two digits are too long
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        await update(c, sampling={"max_response_tokens": 60})
        await ask(c, "ResumeRun")
        failed = await c.until_ended(succeeded=False)
        assert failed.state == pb.Run.STATE_FAILED
        assert "lower the cap" in failed.failure
        await update(c, sampling={"max_response_tokens": 50})
        await c.start(values)
        await c.until_ended()
        schedule = await c.schedule()
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    assert trained == Counter(f"0:{i}" for i in range(1, 25))


async def test_more_steps_may_be_asked_for_than_the_run_was_started_with(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=24, max_steps=3)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
        await update(c, max_steps=5)
        await ask(c, "ResumeRun")
        run = await c.until_ended()
    assert (run.step, run.planned_steps, run.deferred_draw_count) == (5, 5, 0)


# The queue of draws


async def test_draws_are_dropped_requeued_and_reported(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=40)
    async with coordinator(cluster) as c:
        await paused_when(cluster, c, values, lambda draws: len(draws) >= 3)
        queue = (await ask(c, "ListDeferredDraws")).draws
        names = [pb.DrawName(epoch=d.epoch, prompt_id=d.prompt_id) for d in queue]
        await ask(c, "DropDraws", draws=names[:2], reason="wrong reference")
        await ask(c, "RequeueDraws", draws=names[1:2], level=1)  # changed my mind
        await ask(c, "RequeueDraws", draws=names[2:3], level=2)
        unknown = [pb.DrawName(prompt_id="nobody")]
        for method, fields in (
            ("DropDraws", {"draws": unknown, "reason": "x"}),
            ("RequeueDraws", {"draws": unknown, "level": 1}),
        ):
            with pytest.raises(NotFoundError) as caught:
                await ask(c, method, **fields)
            assert caught.value.reason == "DRAW_NOT_FOUND"
        for method, fields in (
            ("DropDraws", {"draws": names[:1]}),
            ("DropDraws", {"reason": "x"}),
            ("RequeueDraws", {"draws": names[:1], "level": 3}),
        ):
            with pytest.raises(InvalidArgumentError):
                await ask(c, method, **fields)
        assert (await c.get()).pending_change_count == 3
    async with coordinator(cluster) as c:  # the changes outlive the coordinator
        await until(c, PAUSED)
        await ask(c, "ResumeRun")
        run = await c.until_ended()
        schedule = await c.schedule()
        listed = await ask(c, "ListDeferredDraws")
    assert [(d.draw.prompt_id, d.reason) for d in listed.dropped] == [
        (names[0].prompt_id, "wrong reference")
    ]
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    expected = Counter(f"0:{i}" for i in range(1, 41))
    del expected[f"0:{names[0].prompt_id}"]
    assert trained == expected
    assert run.dropped_draw_count == 1


async def test_a_draw_is_dropped_before_its_turn_over_crashes_and_may_come_back(
    cluster: Cluster,
) -> None:
    """One stays away, one comes back before its turn, and one after it, with its seeds."""
    values = run_settings(cluster.directory, prompts=40)
    whole_run = dict(pair for _, draws in await whole(cluster, values) for pair in draws)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        taken = {name for _, draws in await c.schedule() for name, _ in draws}
        queue = (await ask(c, "ListDeferredDraws")).draws
        taken |= {f"{draw.epoch}:{draw.prompt_id}" for draw in queue}
        away, early, late = ahead = sorted(whole_run.keys() - taken)[:3]
        names = [pb.DrawName(prompt_id=name.partition(":")[2]) for name in ahead]
        for _ in range(2):
            run = (await ask(c, "DropDraws", draws=names, reason="wrong reference")).run
        assert (run.pending_change_count, run.dropped_draw_count) == (2, 0)
        trained = pb.DrawName(prompt_id=(await c.steps())[0].draws[0].prompt_id)
        for unknown in (trained, pb.DrawName(epoch=1, prompt_id=names[0].prompt_id)):
            with pytest.raises(NotFoundError):
                await ask(c, "DropDraws", draws=[unknown], reason="x")
        await ask(c, "ResumeRun", until_step=2)
        run = await until(c, PAUSED)
        assert run.dropped_draw_count == 3
    async with coordinator(cluster) as c:
        await until(c, PAUSED)
        await ask(c, "RequeueDraws", draws=names[1:2], level=1)
        while not [d for d in (await ask(c, "ListDeferredDraws")).dropped if d.draw.seeds]:
            await ask(c, "ResumeRun", until_step=run.step + 1)
            run = await until(c, PAUSED)
        passed = {d.draw.prompt_id for d in (await ask(c, "ListDeferredDraws")).dropped}
        assert passed == {names[0].prompt_id, names[2].prompt_id}
        await ask(c, "RequeueDraws", draws=names[2:], level=1)
        await ask(c, "ResumeRun")
        await c.until_ended()
        schedule = await c.schedule()
        listed = (await ask(c, "ListDeferredDraws")).dropped
    pairs = [pair for _, draws in schedule for pair in draws]
    assert len(pairs) == 39
    assert {early, late} <= dict(pairs).keys()
    assert dict(pairs) == {name: seeds for name, seeds in whole_run.items() if name != away}
    assert [(f"0:{d.draw.prompt_id}", tuple(d.draw.seeds)) for d in listed] == [
        (away, whole_run[away])
    ]


async def test_a_dropped_draw_stays_dropped_when_a_rewind_takes_its_launch_back(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory, prompts=40)
    async with coordinator(cluster) as c:
        run = await paused_when(cluster, c, values, lambda draws: len(draws) >= 1)
        draw = (await ask(c, "ListDeferredDraws")).draws[0]
        name = pb.DrawName(epoch=draw.epoch, prompt_id=draw.prompt_id)
        await ask(c, "DropDraws", draws=[name], reason="wrong reference")
        await ask(c, "ResumeRun", until_step=run.step + 1)
        await until(c, PAUSED)
    cluster.trainer.disk.snapshots.clear()
    cluster.trainer.disk.results.clear()
    async with coordinator(cluster) as c:
        await until(c, PAUSED)
        await ask(c, "ResumeRun")
        await c.until_ended()
        schedule = await c.schedule()
        listed = (await ask(c, "ListDeferredDraws")).dropped
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    assert trained == Counter(f"0:{i}" for i in range(1, 41) if str(i) != draw.prompt_id)
    assert [(d.draw.prompt_id, d.draw.seeds) for d in listed] == [(draw.prompt_id, draw.seeds)]
    assert await cluster.redis.llen(keys.superseded_steps("r")) >= 1


async def test_a_long_round_is_forced_once(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=80)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        queue = [d.prompt_id for d in (await ask(c, "ListDeferredDraws")).draws]
        assert queue
        for _ in range(2):
            await ask(c, "ForceLongRound")
        await ask(c, "ResumeRun", until_step=3)
        await until(c, PAUSED)
        forced, after = (await c.steps())[1:3]
        assert forced.round_kind == types_pb2.ROUND_KIND_LONG
        assert set(queue[:4]) <= {draw.prompt_id for draw in forced.draws}
        assert after.round_kind == types_pb2.ROUND_KIND_SHORT
        await ask(c, "ResumeRun")
        await c.until_ended()
        with pytest.raises(FailedPreconditionError):
            await ask(c, "ForceLongRound")


# Prompts that come while the run is under way


async def test_added_prompts_are_drawn_next_once_each_and_over_a_crash(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=24)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        names = [f"new-{i}" for i in range(7)]
        answer = await ask(c, "AddPrompts", rows=rows(*names[:5]))
        assert (answer.added_count, answer.known_count) == (5, 0)
        answer = await ask(c, "AddPrompts", rows=rows(*names[3:]))
        assert (answer.added_count, answer.known_count) == (2, 2)
        await ask(c, "ResumeRun", until_step=2)
        await until(c, PAUSED)
        assert {prompt for _, prompt, _, _ in cluster.rollouts[0].sampled} >= {"new-0"} or {
            prompt for _, prompt, _, _ in cluster.rollouts[1].sampled
        } >= {"new-0"}
    async with coordinator(cluster) as c:
        await until(c, PAUSED)
        await ask(c, "ResumeRun")
        run = await c.until_ended()
        schedule = await c.schedule()
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    assert trained == Counter([*(f"0:{i}" for i in range(1, 25)), *(f"0:{name}" for name in names)])
    assert (run.added_prompt_count, run.planned_steps, run.step) == (7, 8, 8)


async def test_an_added_prompt_is_dropped_before_its_turn(cluster: Cluster) -> None:
    values = run_settings(cluster.directory, prompts=24)
    names = [f"new-{i}" for i in range(20)]
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        await ask(c, "AddPrompts", rows=rows(*names))
        await ask(c, "ResumeRun", until_step=2)
        await until(c, PAUSED)
        wrong = pb.DrawName(prompt_id=names[-1])
        await ask(c, "DropDraws", draws=[wrong], reason="wrong answer")
        await ask(c, "ResumeRun")
        run = await c.until_ended()
        schedule = await c.schedule()
    trained = Counter(name for _, draws in schedule for name, _ in draws)
    assert trained == Counter([*(f"0:{i}" for i in range(1, 25)), *(f"0:{n}" for n in names[:-1])])
    assert (run.planned_steps, run.dropped_draw_count) == (run.step, 1)


async def test_prompts_that_come_during_the_last_measurement_are_trained(
    cluster: Cluster,
) -> None:
    write_data(cluster.directory / "validation.jsonl", 2, "1+{i}=")
    values = run_settings(cluster.directory, prompts=8)
    values["data"]["validation_path"] = str(cluster.directory / "validation.jsonl")
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 2)
        gate = cluster.reward.hold()
        await ask(c, "ResumeRun")
        await until_asked(cluster)
        await ask(c, "AddPrompts", rows=rows("late"))
        gate.set()
        run = await c.until_ended()
        schedule = await c.schedule()
    assert [name for name, _ in schedule[-1][1]] == ["0:late"]
    assert (run.step, run.planned_steps) == (3, 3)


async def test_all_rows_of_a_call_are_added_or_none(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 1)
        nameless = Struct()
        nameless.update({"prompt": "1+1=", "answer": "2"})
        for wrong, field in (
            (nameless, "rows[1].prompt_id"),
            (rows("3")[0], "rows[1].prompt_id"),  # the id of a row of the data file
            (rows("b", answer=None)[0], "rows[1].answer"),
            (rows("b", weight=float("nan"))[0], "rows[1]"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                await ask(c, "AddPrompts", rows=[*rows("a"), wrong])
            assert [name for name, _ in caught.value.violations] == [field]
        with pytest.raises(InvalidArgumentError):
            await ask(c, "AddPrompts")
        assert (await c.get()).added_prompt_count == 0
        for known in (0, 1):  # a number may name a prompt; it is "1007" from then on
            answer = await ask(c, "AddPrompts", rows=rows("1007", prompt_id=1007))
            assert (answer.added_count, answer.known_count) == (1 - known, known)


async def test_a_checkpoint_is_saved_on_request(cluster: Cluster) -> None:
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, run_settings(cluster.directory), 2)
        cluster.trainer.restart()
        assert (await ask(c, "SaveCheckpoint")).weight_version == 2
    assert cluster.trainer.saved == [2]


# Runs that wait


async def test_runs_of_the_queue_start_in_order_each_after_the_end_of_the_one_before(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        for place, name in enumerate(("second", "third", "fourth"), start=1):
            waiting = await c.start(values, run_id=name, queue=True, until_step=place)
            assert (waiting.state, waiting.queue_position) == (pb.Run.STATE_QUEUED, place)
            assert waiting.pause_at_step == place
        assert (await c.start(values, run_id="third")).state == pb.Run.STATE_QUEUED
        with pytest.raises(FailedPreconditionError):
            await ask(c, "PauseRun", run_id="third")
        stopped = (await ask(c, "StopRun", run_id="third")).run
        assert stopped.state == pb.Run.STATE_STOPPED
    async with coordinator(cluster) as c:  # the queue outlives the coordinator
        assert (await until(c, PAUSED)).run_id == "r"
        assert (await c.get("fourth")).queue_position == 2
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        start_over(cluster)
        for name, until_step in (("second", 1), ("fourth", 3)):
            assert (await until(c, PAUSED, name)).step == until_step
            await ask(c, "ResumeRun", run_id=name)
            await c.until_ended(name)
            start_over(cluster)
        runs = {name: await c.get(name) for name in ("r", "second", "third", "fourth")}
    assert runs["third"].step == 0
    assert runs["r"].state == pb.Run.STATE_STOPPED
    lines = [
        (Path(runs[name].run_directory) / "metrics.jsonl").read_text().splitlines()
        for name in ("second", "fourth")
    ]
    ends = [[json.loads(line)["end_time"] for line in of_run] for of_run in lines]
    assert max(ends[0]) < min(ends[1])


async def test_a_queued_run_that_cannot_start_fails_and_the_next_one_starts(
    cluster: Cluster,
) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        await c.start(values, run_id="bad", queue=True)
        await c.start(values, run_id="good", queue=True)
        (cluster.directory / "runs" / "bad").write_text("in the way")
        await c.stop(pb.STOP_MODE_IMMEDIATELY)
        start_over(cluster)
        failed = await c.until_ended("bad", succeeded=False)
        assert failed.state == pb.Run.STATE_FAILED
        await c.until_ended("good")


async def test_a_run_is_in_the_queue_before_its_turn_can_come(cluster: Cluster) -> None:
    """The active run ends in the moment in which the other one gets its place."""
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        await paused_at(cluster, c, values, 1)
        add = c.runs._queue.add

        async def add_and_end_the_active_one(run_id: str) -> None:
            await add(run_id)
            await c.stop(pb.STOP_MODE_IMMEDIATELY)
            async with asyncio.timeout(60):
                while (await c.get(run_id)).state == pb.Run.STATE_QUEUED:
                    await asyncio.sleep(0.005)

        c.runs._queue.add = add_and_end_the_active_one
        await c.start(values, run_id="next", queue=True)
        await c.until_ended("next")


async def test_of_several_open_runs_one_is_driven_and_no_other_is_lost(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c:
        gate = cluster.reward.hold()
        await c.start(values)
        state = await c.runs.get("r")
    beside = {"paused": -1, "running": 1, "stopping": 2, "queued": 3}  # age after that of r
    for status, age in beside.items():
        time = state.create_time + age
        other = dataclasses.replace(state, run_id=status, status=status, create_time=time)
        await RunStore(cluster.redis, status).create(other)
    async with coordinator(cluster) as c:
        await c.start(values, run_id="later", queue=True)
        runs = {name: await c.get(name) for name in ("r", *beside, "later")}
        assert {name: (run.state, run.queue_position) for name, run in runs.items()} == {
            "r": (RUNNING, 0),
            "paused": (PAUSED, 0),
            "running": (pb.Run.STATE_QUEUED, 1),
            "stopping": (pb.Run.STATE_STOPPED, 0),
            "queued": (pb.Run.STATE_QUEUED, 2),
            "later": (pb.Run.STATE_QUEUED, 3),
        }
        gate.set()
        for name in ("r", "running", "queued", "later"):
            await c.until_ended(name)
        assert (await c.start(values, run_id="paused")).state == RUNNING
        await c.until_ended("paused")


# Samples


@pytest.mark.parametrize(("page_bytes", "pages"), [(16 << 20, 5), (1, 24)])
async def test_samples_are_filtered_and_paged_over_steps(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, page_bytes: int, pages: int
) -> None:
    async with coordinator(cluster) as c:
        await c.start(run_settings(cluster.directory))
        await c.until_ended()
        everything = (await ask(c, "ListSamples", step=0, last_step=5)).groups
        assert [g.step for g in everything] == sorted(s for s in range(6) for _ in range(4))
        with monkeypatch.context() as patch:
            patch.setattr("services.coordinator.samples_page._PAGE_BYTES", page_bytes)
            paged, count, token = [], 0, ""
            while token or not count:
                fields = {"step": 0, "last_step": 5, "page_size": 5, "page_token": token}
                page = await ask(c, "ListSamples", **fields)
                paged, count, token = [*paged, *page.groups], count + 1, page.next_page_token
        assert (paged, count) == (list(everything), pages)
        assert not (await ask(c, "ListSamples", last_step=5, min_reward=0.5)).groups
        wrong = {"verdicts": [types_pb2.VERDICT_INCORRECT], "max_reward": 0.5}
        assert (await ask(c, "ListSamples", last_step=5, **wrong)).groups == everything
        long = (await ask(c, "ListSamples", last_step=5, min_tokens=10, max_tokens=12)).groups
        assert {10 <= len(s.response.token_ids) <= 12 for g in long for s in g.responses} == {True}
        one = (await ask(c, "ListSamples", last_step=5, prompt_id="7", without_tokens=True)).groups
        assert [(g.draw.prompt_id, len(g.prompt_token_ids)) for g in one] == [("7", 0)]
        assert one[0].responses[0].text
        tokens = ({"page_token": token} for token in ("x", "²:0", "9" * 5000 + ":0"))
        for bad in (*tokens, {"page_size": 1001}, {"step": 3, "last_step": 1}):
            with pytest.raises(InvalidArgumentError):
                await ask(c, "ListSamples", **bad)


async def test_a_coordinator_that_has_not_looked_for_open_runs_takes_no_wish(
    cluster: Cluster,
) -> None:
    """It would answer as if the run were not driven, and the wish would be lost."""
    gate = cluster.reward.hold()
    async with coordinator(cluster) as c, coordinator(cluster, "standby") as standby:
        await c.start(run_settings(cluster.directory))
        with pytest.raises(UnavailableError):
            await standby.stop(pb.STOP_MODE_IMMEDIATELY)
        assert (await c.get()).state == pb.Run.STATE_RUNNING
        gate.set()
        await c.until_ended()
