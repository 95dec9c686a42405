"""The commit point of a run, against a real Redis server."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from rollpacker.policy.bias_meter import BiasMeter
from rollpacker.policy.commands import FinishRound
from rollpacker.policy.selection_weights import WeighedSums
from rollpacker.store import keys
from rollpacker.store.lease import CoordinatorLease
from rollpacker.store.records import (
    LAYOUT_VERSION,
    DroppedDraw,
    RunState,
    StepOutcome,
    Totals,
    outcome_from_json,
    outcome_to_json,
    state_from_json,
    state_to_json,
)
from rollpacker.store.run_store import (
    RunStore,
    StaleFenceError,
    StepMismatchError,
    list_run_ids,
)
from rollpacker.types import DeferredDraw, Draw, LostRace, RoundKind, StepRecord

DRAW = Draw(0, "p1", (2**63 - 1, 5), level=1, first_step=3)
QUEUE = (
    DeferredDraw(DRAW, (10, 20), (False, True), LostRace(9, 4, 1.25)),
    DeferredDraw(dataclasses.replace(DRAW, prompt_id="p2", level=2), (1, 2), (True, True)),
)
STATE = RunState("demo", {"seed": 1}, create_time=12.5)


def after_step(state: RunState) -> RunState:
    totals = Totals(7, trained_groups=2, trained_lengths={3: 2, 9: 1}, weighed={"groups": 2.0})
    return dataclasses.replace(
        state, step=state.step + 1, weight_version=state.step + 1, deferred=QUEUE, totals=totals
    )


def record(step: int) -> StepRecord:
    return StepRecord(step, RoundKind.SHORT, 0, 1.0, 2.0, 3.0, step + 1, (DRAW,), {"loss": 0.5})


async def committed(redis: Redis, steps: int = 1) -> tuple[RunStore, RunState]:
    store, state = RunStore(redis, "demo"), STATE
    await store.create(state)
    for step in range(steps):
        state = after_step(state)
        await store.commit(1, state, record(step))
    return store, state


async def test_a_committed_state_is_read_back_whole(redis_client: Redis) -> None:
    store, state = await committed(redis_client)
    assert await store.load() == state
    assert await store.records_before(10, 5) == [record(0)]
    assert await list_run_ids(redis_client) == ["demo"]


async def test_creating_a_run_again_changes_nothing(redis_client: Redis) -> None:
    store, state = await committed(redis_client)
    await store.create(dataclasses.replace(STATE, settings={"seed": 2}))
    assert await store.load() == state


async def test_an_unknown_run_has_no_state(redis_client: Redis) -> None:
    assert await RunStore(redis_client, "nobody").load() is None


async def test_a_stale_coordinator_commits_nothing(redis_client: Redis) -> None:
    store, state = await committed(redis_client)
    await store.claim(7)
    with pytest.raises(StaleFenceError):
        await store.commit(6, after_step(state), record(1))
    with pytest.raises(StaleFenceError):
        await store.set_status(6, "failed")
    with pytest.raises(StaleFenceError):
        await store.claim(6)
    assert await store.load() == state


async def test_a_repeated_commit_has_no_effect_and_another_one_is_refused(
    redis_client: Redis,
) -> None:
    store, state = await committed(redis_client)
    await store.commit(1, state, record(0))
    assert await store.load() == state
    assert len(await store.records_before(10, 10)) == 1
    with pytest.raises(StepMismatchError):
        await store.commit(1, state, dataclasses.replace(record(0), level=2))
    with pytest.raises(StepMismatchError):
        await store.commit(1, state, record(5))


async def test_a_rewind_restores_state_and_queue_and_supersedes_later_records(
    redis_client: Redis,
) -> None:
    store, _ = await committed(redis_client, steps=3)
    snapshot = after_step(STATE)
    await redis_client.set(keys.step_result("demo", 2), b"x")
    await store.save_outcome(1, StepOutcome((DRAW,), snapshot, record(1)))
    await store.rewind(2, state_from_json(state_to_json(snapshot)))
    assert await store.load() == snapshot
    assert [r.step for r in await store.records_before(10, 10)] == [0]
    assert await redis_client.llen(keys.superseded_steps("demo")) == 2
    assert await store.outcome(1) is None
    assert await redis_client.get(keys.step_result("demo", 2)) is None
    await store.commit(2, after_step(snapshot), record(1))


async def test_an_open_step_begins_anew_for_a_change_unless_its_outcome_is_fixed(
    redis_client: Redis,
) -> None:
    store, state = await committed(redis_client)
    begun = dataclasses.replace(state, begun_step=1)
    await store.begin_step(1, begun, changed=False)
    await redis_client.xadd(keys.step_samples("demo", 1), {"group": b"x"})
    await store.reopen_step(1)
    assert await store.load() == begun  # nothing waits for it
    await store.append_change(1, "{}")
    await store.save_outcome(1, StepOutcome((DRAW,), after_step(state), record(1)))
    await store.reopen_step(1)
    assert await store.load() == begun
    await redis_client.delete(keys.step_outcome("demo", 1))
    with pytest.raises(StaleFenceError):
        await store.reopen_step(0)
    for _ in range(2):
        await store.reopen_step(1)
        assert await store.load() == dataclasses.replace(begun, begun_step=-1)
        assert await redis_client.exists(keys.step_samples("demo", 1)) == 0


async def test_an_outcome_survives_until_it_is_forgotten(redis_client: Redis) -> None:
    store, state = await committed(redis_client)
    outcome = StepOutcome((DRAW,), after_step(state), record(1))
    assert await store.outcome(1) is None
    await store.save_outcome(1, outcome)
    assert await store.outcome(1) == outcome
    await store.forget_step(1)
    assert await store.outcome(1) is None


async def test_every_commit_and_status_is_an_event_in_order(redis_client: Redis) -> None:
    store, _ = await committed(redis_client, steps=2)
    await store.set_status(1, "succeeded")
    events = await store.read_events("0-0", 0.1)
    assert [(e.kind, e.record.step if e.record else None) for e in events] == [
        ("step", 0),
        ("step", 1),
        ("run", None),
    ]
    assert await store.read_events(events[1].revision, 0.1) == events[2:]
    assert await store.last_revision() == events[-1].revision


async def test_a_status_survives_the_next_commit(redis_client: Redis) -> None:
    store, state = await committed(redis_client)
    await store.set_status(1, "stopping", stop_mode="drain")
    await store.commit(1, after_step(state), record(1))
    loaded = await store.load()
    assert loaded is not None
    assert (loaded.status, loaded.stop_mode, loaded.step) == ("stopping", "drain", 2)


async def test_a_state_of_another_layout_is_refused_with_the_reason() -> None:
    text = json.dumps({**json.loads(state_to_json(STATE)), "layout_version": 99})
    with pytest.raises(ValueError, match="layout 99, this version reads 1, 2, 3, 4"):
        state_from_json(text)


def of_older_layout(values: dict[str, Any], layout: int) -> RunState:
    """Read without what layout 6 has added."""
    del values["totals"]["weighed"]
    for item in values["deferred"]:
        del item["lost"]
    return state_from_json(json.dumps({**values, "layout_version": layout}))


def with_groups_that_count_1(state: RunState) -> RunState:
    totals = dataclasses.replace(
        state.totals,
        weighed={"groups": 2, "weights": 2, "squared_weights": 2, "responses": 3, "tokens": 15},
    )
    deferred = tuple(dataclasses.replace(item, lost=None) for item in state.deferred)
    return dataclasses.replace(state, totals=totals, deferred=deferred)


def test_a_run_of_layout_5_goes_on_with_groups_that_count_1() -> None:
    state = after_step(STATE)
    taken = of_older_layout(json.loads(state_to_json(state)), 5)
    assert taken == with_groups_that_count_1(state)
    sums = WeighedSums(**taken.totals.weighed)
    assert (sums.mean_length, sums.effective_share) == (5.0, 1.0)


def test_a_state_of_layout_1_is_taken_over() -> None:
    state = after_step(STATE)
    values = json.loads(state_to_json(state))
    del values["ladder_memory"]
    assert of_older_layout(values, 1) == with_groups_that_count_1(state)


@pytest.mark.parametrize(
    ("tail", "updated", "in_force"),
    [
        ({"mode": "auto", "speculation_factors": None}, {}, [2.0, 2.0, 2.0]),
        ({"mode": "auto"}, {"speculation_factors": [1.5]}, [1.5]),
        ({"mode": "auto", "deferral_levels": 1}, {}, None),
        ({"mode": "exact"}, {}, None),
    ],
)
def test_a_run_of_layout_3_keeps_the_ladder_that_mode_auto_began_with(
    tail: dict[str, Any], updated: dict[str, Any], in_force: list[float] | None
) -> None:
    """It may have a step under way that was planned with it."""
    state = dataclasses.replace(
        STATE,
        settings={"tail_batching": tail},
        updated_settings={"tail_batching": updated} if updated else {},
    )
    values = {**json.loads(state_to_json(state)), "layout_version": 3}
    taken = state_from_json(json.dumps(values)).updated_settings.get("tail_batching", {})
    assert taken.get("speculation_factors") == in_force
    assert state_from_json(state_to_json(state)) == state


def test_a_state_of_layout_3_is_taken_over_and_its_meter_goes_on() -> None:
    state = after_step(STATE)
    values = json.loads(state_to_json(state))
    del values["totals"]["first_lengths"]
    taken = of_older_layout(values, 3)
    assert taken == with_groups_that_count_1(state)
    totals = taken.totals
    meter = BiasMeter(totals.trained_lengths, totals.cut_lengths, totals.first_lengths)
    assert meter.read(()).ratio == 1
    finish = FinishRound((DRAW.id,), (), 0, 0.0, 0.0)
    meter.add_round(taken.deferred, {DRAW.id: {0: 4, 1: 20}}, finish)
    bias = meter.read(taken.deferred[1:])
    assert bias.shorter_again_share == 1  # of one that had ten tokens
    assert bias.uncensored_mean == (3 + 3 + 9 + 10 + 20 + 1 + 2) / 7


async def test_one_coordinator_at_a_time_and_every_one_has_a_higher_fence(
    redis_client: Redis,
) -> None:
    first = CoordinatorLease(redis_client, "a", seconds=60)
    second = CoordinatorLease(redis_client, "b", seconds=60)
    fence = await first.acquire()
    assert fence is not None
    assert await second.acquire() is None
    assert await first.renew(fence)
    again = await first.acquire()  # the same coordinator after a restart
    assert again is not None
    assert again > fence
    assert not await first.renew(fence)
    await first.release(again)
    other = await second.acquire()
    assert other is not None
    assert other > again
    assert not await first.renew(again)


async def test_a_late_holder_takes_its_lease_again_unless_another_has_had_it(
    redis_client: Redis,
) -> None:
    first = CoordinatorLease(redis_client, "a", seconds=60)
    second = CoordinatorLease(redis_client, "b", seconds=60)
    fence = await first.acquire()
    assert fence is not None
    await redis_client.delete(keys.COORDINATOR_LEASE)  # it ran out
    assert await first.renew(fence)
    assert await redis_client.pttl(keys.COORDINATOR_LEASE) > 0
    assert await second.acquire() is None
    await redis_client.delete(keys.COORDINATOR_LEASE)
    other = await second.acquire()
    assert other is not None
    assert not await first.renew(fence)  # the other one holds it
    await second.release(other)
    assert not await first.renew(fence)  # nobody holds it, but the other one has written
    assert not await redis_client.exists(keys.COORDINATOR_LEASE)


async def test_the_logs_of_a_run_only_grow_and_only_by_the_newest_fence(
    redis_client: Redis,
) -> None:
    store, state = await committed(redis_client)
    await store.append_change(2, "first")
    rows = {"a": '{"prompt_id": "a"}', "b": '{"prompt_id": "b"}'}
    assert [await store.add_prompts(2, rows) for _ in range(2)] == [2, 0]
    assert await store.log_lengths() == (1, 2)
    assert await store.changes_from(0) == ["first"]
    assert await store.added_prompts(1, 2) == [rows["b"]]
    for refused in (
        store.append_change(1, "late"),
        store.add_prompts(1, {"c": "{}"}),
        store.begin_step(1, state, changed=False),
        store.set_status(1, "paused"),
    ):
        with pytest.raises(StaleFenceError):
            await refused
    assert await store.log_lengths() == (1, 2)


async def test_what_a_step_contains_is_settled_at_the_commit_point_only(
    redis_client: Redis,
) -> None:
    store, state = await committed(redis_client)
    begun = dataclasses.replace(state, begun_step=state.step, change_count=1, deferred=QUEUE[:1])
    await store.begin_step(1, begun, changed=False)
    assert (await store.load() or STATE).deferred == QUEUE  # the queue was not to change
    await store.begin_step(1, begun, changed=True)
    assert await store.load() == begun
    with pytest.raises(StepMismatchError):
        await store.begin_step(1, dataclasses.replace(begun, step=7), changed=True)


async def test_a_status_changes_only_from_those_that_are_named(redis_client: Redis) -> None:
    store, _ = await committed(redis_client)
    assert await store.set_status(1, "pausing", pause_at=0, only_from=("running",))
    assert not await store.set_status(1, "stopping", only_from=("running",))
    loaded = await store.load()
    assert loaded is not None
    assert (loaded.status, loaded.pause_at) == ("pausing", 0)


async def test_a_status_that_is_there_already_is_no_refusal(redis_client: Redis) -> None:
    """The reply of the first call was lost."""
    store, _ = await committed(redis_client)
    for _ in range(2):
        assert await store.set_status(1, "paused", only_from=("running",))
    assert len(await store.read_events("0-0", 0.1)) == 2  # the step, and one change of the status


def test_the_json_of_a_state_and_an_outcome_has_every_field() -> None:
    dropped = (DroppedDraw(QUEUE[1], "too long", 4),)
    state = dataclasses.replace(
        after_step(STATE), dropped=dropped, ladder_memory={"steps": [1]}, pause_at=3
    )
    totals = dataclasses.replace(state.totals, first_lengths={"moved": [[3, -1]]})
    state = dataclasses.replace(state, totals=totals)
    step = dataclasses.replace(record(1), flat_draws=(QUEUE[1].draw,))
    text = state_to_json(state)
    assert text == json.dumps({**dataclasses.asdict(state), "layout_version": LAYOUT_VERSION})
    assert state_from_json(text) == state
    whole = json.loads(outcome_to_json(StepOutcome(step.draws, state, step)))
    assert whole["next_state"] == text
    kind = {"round_kind": step.round_kind.value}
    assert whole["record"] == json.dumps({**dataclasses.asdict(step), **kind})
    assert outcome_from_json(json.dumps(whole)) == StepOutcome(step.draws, state, step)
