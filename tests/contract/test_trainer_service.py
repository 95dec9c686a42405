"""TrainerService over real loopback gRPC and a real Redis: what trainer_service.proto promises."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollpacker.rpc.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from rollpacker.store import keys
from rollpacker.store.sample_stream import SampleStream
from rollpacker.v1 import trainer_service_pb2 as pb
from services.trainer import server
from tests.trainer_support import (
    RUN,
    draws_of,
    fill_stream,
    make_groups,
    make_model,
    make_response,
    open_run_request,
    published_weights,
    same_bits,
    serving_trainer,
    trainer_settings,
)

METRICS = {
    "loss",
    "grad_norm",
    "entropy",
    "mismatch_kl",
    "mismatch_ratio_max",
    "clip_fraction",
    "reference_kl",
    "correction_weight",
    "advantage_rms",
    "trained_tokens",
    "trained_responses",
    "micro_batches",
    "padding_share",
    "skipped_update",
    "learning_rate",
    "accumulate_seconds",
    "update_seconds",
    "checkpoint_seconds",
    "publish_seconds",
}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
async def trainer(redis_client, tmp_path):
    async with serving_trainer(redis_client, tmp_path) as served:
        yield served


@pytest.fixture
async def opened(trainer, model):
    await trainer.open(open_run_request(model))
    return trainer


async def refused(awaitable, kind: type[ServiceError], reason: str) -> str:
    """The message of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        await awaitable
    assert caught.value.reason == reason
    return caught.value.message


async def until(condition) -> None:
    """Wait for an awaitable condition; the test's own timeout ends it."""
    while not await condition():
        await asyncio.sleep(0.01)


# OpenRun


async def test_open_run_publishes_the_initial_model_as_version_0(trainer, model):
    opened = await trainer.open(open_run_request(model))
    assert (opened.weight_version, opened.run_snapshot_json) == (0, "")
    published = AutoModelForCausalLM.from_pretrained(opened.weights_uri.removeprefix("file://"))
    initial = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all((published.state_dict()[name] == initial[name]).all() for name in initial)


async def test_open_run_again_returns_the_weights_in_force(opened, model, redis_client):
    result = await opened.train(redis_client, 0, make_groups(0))
    again = await opened.open(open_run_request(model))
    assert (again.weight_version, again.weights_uri) == (1, result.weights_uri)
    assert again.run_snapshot_json == "after step 0"


async def test_other_settings_are_taken_before_the_first_step_and_refused_after(
    opened, model, redis_client, tmp_path
):
    changed = open_run_request(model, trainer_settings(clip_high=0.5))
    await opened.open(changed)
    await opened.train(redis_client, 0, make_groups(0))
    await opened.open(changed)
    for other in (open_run_request(model), open_run_request(model, temperature=0.5)):
        await refused(opened.open(other), FailedPreconditionError, "SETTINGS_DIFFER")
    async with serving_trainer(redis_client, tmp_path) as restarted:
        await refused(
            restarted.open(open_run_request(model)), FailedPreconditionError, "SETTINGS_DIFFER"
        )


# What may differ from step to step


async def test_a_step_trains_at_the_learning_rate_that_it_began_with(opened, redis_client):
    still = await opened.train(redis_client, 0, make_groups(0), learning_rate=0.0)
    moved = await opened.train(redis_client, 1, make_groups(1))
    assert (still.metrics["learning_rate"], moved.metrics["learning_rate"]) == (
        0.0,
        trainer_settings().learning_rate,
    )
    initial = still.weights_uri.replace("step_000001", "step_000000")
    assert same_bits(initial, still.weights_uri)
    assert not same_bits(still.weights_uri, moved.weights_uri)


async def test_the_temperature_of_a_step_is_that_of_a_run_opened_with_it(
    trainer, model, redis_client, tmp_path
):
    await trainer.open(open_run_request(model))
    given = await trainer.train(redis_client, 0, make_groups(0), temperature=0.5)
    (tmp_path / "second").mkdir()
    await redis_client.flushall()
    async with serving_trainer(redis_client, tmp_path / "second") as second:
        await second.open(open_run_request(model, temperature=0.5))
        opened_with = await second.train(redis_client, 0, make_groups(0))
    assert given.metrics["entropy"] == opened_with.metrics["entropy"]
    assert given.metrics["mismatch_kl"] == opened_with.metrics["mismatch_kl"]


async def test_values_of_a_step_outside_their_range_are_refused(opened):
    for values in ({"learning_rate": -1.0}, {"temperature": 0.0}, {"learning_rate": math.inf}):
        await refused(opened.start(0, **values), InvalidArgumentError, "INVALID_FIELD")


async def test_a_checkpoint_is_saved_between_intervals_and_found_by_the_next_trainer(
    trainer, model, redis_client, tmp_path
):
    request = open_run_request(model, trainer_settings(checkpoint_interval=10))
    await trainer.open(request)
    assert await trainer.save_checkpoint() == 0
    await trainer.train(redis_client, 0, make_groups(0))
    await trainer.start(1)
    assert [await trainer.save_checkpoint() for _ in range(2)] == [1, 1]
    async with serving_trainer(redis_client, tmp_path) as restarted:
        again = await restarted.open(request)
    assert (again.weight_version, again.run_snapshot_json) == (1, "after step 0")


@pytest.mark.parametrize("missing", ["directory", "config", "weights"])
async def test_a_model_that_cannot_be_loaded_is_not_found(trainer, model, missing):
    if missing == "config":
        (model / "config.json").unlink()
    if missing == "weights":
        (model / "model.safetensors").unlink()
    place = model / "nowhere" if missing == "directory" else model
    await refused(trainer.open(open_run_request(place)), NotFoundError, "MODEL_NOT_FOUND")
    await refused(trainer.start(0), FailedPreconditionError, "RUN_NOT_OPEN")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("run_id", "../elsewhere", "run_id"),
        ("run_id", "", "run_id"),
        ("temperature", 0.0, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("model_uri", "https://host/model", "model_uri"),
        ("model_uri", "relative", "model_uri"),
        ("trainer_settings", {"clip_lo": 1}, "trainer_settings.clip_lo"),
    ],
)
async def test_open_run_names_the_wrong_field(trainer, model, field, value, named):
    request = open_run_request(model)
    if field == "trainer_settings":
        request.trainer_settings.update(value)
    else:
        setattr(request, field, value)
    with pytest.raises(InvalidArgumentError) as caught:
        await trainer.open(request)
    assert named in dict(caught.value.violations)


async def test_another_run_takes_the_place_of_the_open_one(opened, model):
    await opened.start(0)
    await opened.open(open_run_request(model, run_id="run-2"))
    await refused(opened.start(0), FailedPreconditionError, "RUN_NOT_OPEN")
    assert (await opened.get()).run_id == "run-2"


# StartStep


async def test_a_step_starts_at_its_own_weight_version_only(opened):
    for step, version in ((1, 1), (0, 1), (1, 0)):
        await refused(
            opened.start(step, weight_version=version),
            FailedPreconditionError,
            "WEIGHT_VERSION_MISMATCH",
        )
    await opened.start(0)
    await opened.start(0)
    assert (await opened.get()).state == pb.GetTrainerResponse.STATE_ACCUMULATING


async def test_a_step_that_is_finished_starts_as_a_repeat(opened, redis_client):
    await opened.train(redis_client, 0, make_groups(0))
    await opened.start(0)
    assert (await opened.get()).state == pb.GetTrainerResponse.STATE_IDLE


async def test_groups_accumulate_while_the_step_is_open_and_weights_do_not_move(
    opened, redis_client
):
    await opened.start(0)
    await fill_stream(redis_client, 0, make_groups(0, 9))

    async def all_taken():  # a window of 8; the ninth waits for others
        return (await opened.get()).accumulated_group_count == 8

    await until(all_taken)
    state = await opened.get()
    assert (state.step, state.weight_version, state.world_size) == (0, 0, 1)


# FinishStep


async def test_finish_step_updates_publishes_records_and_acknowledges(
    opened, redis_client, tmp_path
):
    groups = make_groups(0, 9)
    result = await opened.train(redis_client, 0, groups)
    assert result.weight_version == 1
    assert list(result.draws) == draws_of(groups)
    assert result.metrics.keys() == METRICS
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["trained_responses"] == 36
    before = published_weights((tmp_path / "weights" / RUN / "step_000000").as_uri())
    after = published_weights(result.weights_uri)
    assert any((before[name] != after[name]).any() for name in before)
    assert await SampleStream(redis_client, RUN, 0).result() == result
    (group,) = await redis_client.xinfo_groups(keys.step_samples(RUN, 0))
    assert (group["pending"], group["entries-read"]) == (0, 9)


async def test_finish_step_again_returns_the_recorded_result(opened, redis_client):
    groups = make_groups(0)
    result = await opened.train(redis_client, 0, groups)
    await redis_client.delete(keys.step_samples(RUN, 0))  # as the commit does
    assert await opened.finish(0, draws_of(groups)) == result
    assert await opened.finish(0, draws_of(groups)[::-1]) == result
    assert not await redis_client.exists(keys.step_samples(RUN, 0))
    await opened.train(redis_client, 1, make_groups(1))
    assert await opened.finish(0, draws_of(groups)) == result


async def test_a_finished_step_is_not_finished_with_other_draws(opened, redis_client):
    groups = make_groups(0)
    await opened.train(redis_client, 0, groups)
    for draws in (draws_of(groups)[1:], draws_of(groups + make_groups(3, 1))):
        await refused(opened.finish(0, draws), FailedPreconditionError, "STEP_DRAWS_DIFFER")


async def test_a_step_that_is_not_open_cannot_be_finished(opened, trainer):
    await refused(opened.finish(0, []), FailedPreconditionError, "STEP_NOT_OPEN")


async def test_a_step_without_draws_finishes(opened):
    await opened.start(0)
    result = await opened.finish(0, [])
    assert (result.weight_version, result.metrics["grad_norm"]) == (1, 0.0)


async def test_a_named_draw_that_does_not_appear_is_waited_for_until_the_deadline(
    opened, redis_client, monkeypatch
):
    monkeypatch.setattr(server, "_REPLY_SECONDS", 59.5)  # a slow machine's answer is in time too
    groups = make_groups(0)
    await opened.start(0)
    await fill_stream(redis_client, 0, groups[:-1])
    message = await refused(
        opened.finish(0, draws_of(groups)), DeadlineExceededError, "DRAWS_MISSING"
    )
    assert str(groups[-1].draw.id) in message
    monkeypatch.undo()
    waiting = asyncio.create_task(opened.finish(0, draws_of(groups)))
    await fill_stream(redis_client, 0, groups[-1:])
    assert (await waiting).weight_version == 1


async def test_a_draw_in_the_stream_that_is_not_named_is_refused_and_the_step_stays_open(
    opened, redis_client
):
    groups = make_groups(0)
    await opened.start(0)
    await fill_stream(redis_client, 0, groups)
    await refused(
        opened.finish(0, draws_of(groups[1:])), FailedPreconditionError, "STEP_DRAWS_DIFFER"
    )
    assert (await opened.finish(0, draws_of(groups))).weight_version == 1


async def test_a_draw_that_is_in_the_stream_twice_is_trained_once(opened, redis_client):
    groups = make_groups(0)
    await opened.start(0)
    await fill_stream(redis_client, 0, [*groups, groups[2], groups[0]])
    result = await opened.finish(0, draws_of(groups))
    assert result.metrics["trained_responses"] == 4 * len(groups)


async def test_a_group_of_selection_weight_0_is_taken_and_acknowledged_but_not_trained(
    opened, model, redis_client, tmp_path
):
    groups = make_groups(0)
    groups[1] = dataclasses.replace(groups[1], selection_weight=0.0)
    result = await opened.train(redis_client, 0, groups)
    (group,) = await redis_client.xinfo_groups(keys.step_samples(RUN, 0))
    assert (group["pending"], group["entries-read"]) == (0, len(groups))
    assert list(result.draws) == draws_of(groups)
    assert result.metrics["trained_responses"] == 4 * (len(groups) - 1)
    await redis_client.flushdb()
    async with serving_trainer(redis_client, tmp_path / "without") as trainer:
        await trainer.open(open_run_request(model))
        without = await trainer.train(redis_client, 0, [groups[0], *groups[2:]])
    assert same_bits(result.weights_uri, without.weights_uri)
    assert [result.metrics[name] for name in ("loss", "trained_tokens")] == [
        without.metrics[name] for name in ("loss", "trained_tokens")
    ]


async def test_a_draw_that_is_named_twice_is_refused(opened):
    await opened.start(0)
    draw = make_groups(0)[0].draw
    with pytest.raises(InvalidArgumentError) as caught:
        await opened.finish(0, [draw, draw])
    assert "draws" in dict(caught.value.violations)


async def test_the_weights_depend_on_the_order_of_the_stream_not_on_arrival(
    model, redis_client, tmp_path
):
    groups = make_groups(0, 19)
    uris = []
    for name in ("at once", "one by one"):
        async with serving_trainer(redis_client, tmp_path / name) as trainer:
            await trainer.open(open_run_request(model))
            await redis_client.flushdb()
            if name == "at once":
                await fill_stream(redis_client, 0, groups)
                await trainer.start(0)
            else:
                await trainer.start(0)
                for group in groups:
                    await fill_stream(redis_client, 0, [group])
                    await asyncio.sleep(0.003)
            named = sorted(draws_of(groups), key=lambda draw: draw.prompt_id)
            uris.append((await trainer.finish(0, named)).weights_uri)
    assert same_bits(*uris)


def with_first_response(group, response):
    return dataclasses.replace(group, responses=(response, *group.responses[1:]))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda group: dataclasses.replace(group, weight_version=7), "weight version 7"),
        (lambda group: dataclasses.replace(group, prompt_token_ids=()), "its prompt has no token"),
        (
            lambda group: dataclasses.replace(group, prompt_token_ids=(3, 10**6)),
            "token 1000000 is none of the 17",
        ),
        (
            lambda group: dataclasses.replace(group, selection_weight=-0.5),
            "selection_weight is -0.5; whoever writes the stream must give it a finite one",
        ),
        (
            lambda group: dataclasses.replace(group, selection_weight=math.nan),
            "selection_weight is nan",
        ),
        (
            lambda group: dataclasses.replace(group, selection_weight=math.inf),
            "selection_weight is inf",
        ),
        (
            lambda group: with_first_response(group, make_response([2, -1])),
            "token -1 is none of the 17",
        ),
        (
            lambda group: with_first_response(group, make_response([2], advantage=math.nan)),
            "response r0 has advantage nan",
        ),
    ],
)
async def test_groups_of_another_step_or_model_fail_the_step_until_it_is_abandoned(
    opened, redis_client, spoil, what
):
    await opened.start(0)
    await fill_stream(redis_client, 0, [spoil(make_groups(0)[0])])
    message = await refused(opened.finish(0, []), FailedPreconditionError, "INVALID_SAMPLE")
    assert what in message
    await redis_client.delete(keys.step_samples(RUN, 0))
    await opened.abandon(0)
    assert (await opened.train(redis_client, 0, make_groups(0))).weight_version == 1


async def test_a_caller_that_gives_up_leaves_the_update_running_and_a_repeat_joins_it(
    opened, redis_client
):
    groups = make_groups(0)
    await opened.start(0)
    await fill_stream(redis_client, 0, groups)
    gate = threading.Event()
    blocked = asyncio.create_task(opened.leader.in_thread(gate.wait))
    first = asyncio.create_task(opened.finish(0, draws_of(groups)))

    async def updating():
        return (await opened.get()).state == pb.GetTrainerResponse.STATE_UPDATING

    await until(updating)  # and so GetTrainer is answered while the torch thread is busy
    first.cancel()
    with pytest.raises((asyncio.CancelledError, CancelledError)):
        await first
    second = asyncio.create_task(opened.finish(0, draws_of(groups)))
    abandoning = asyncio.create_task(opened.abandon(0))
    gate.set()
    await blocked
    assert (await second).weight_version == 1
    await refused(abandoning, FailedPreconditionError, "STEP_FINISHED")
    assert (await opened.get()).weight_version == 1


async def test_three_updates_in_a_row_without_a_finite_gradient_end_the_run(opened, redis_client):
    def broken(step):
        groups = make_groups(step)
        response = make_response([1, 2], advantage=1e308, weight_version=step)
        return [*groups[1:], dataclasses.replace(groups[0], responses=(response,))]

    good = await opened.train(redis_client, 0, make_groups(0))
    for step in (1, 2):
        result = await opened.train(redis_client, step, broken(step))
        assert result.metrics["skipped_update"] == 1
        assert (result.weight_version, same_bits(result.weights_uri, good.weights_uri)) == (
            step + 1,
            True,
        )
    await refused(
        opened.train(redis_client, 3, broken(3)), FailedPreconditionError, "NON_FINITE_GRADIENTS"
    )
    await refused(
        opened.finish(3, draws_of(broken(3))), FailedPreconditionError, "NON_FINITE_GRADIENTS"
    )
    await opened.abandon(3)
    await redis_client.delete(keys.step_samples(RUN, 3))
    result = await opened.train(redis_client, 3, make_groups(3))  # a finite one ends the row
    assert (result.weight_version, result.metrics["skipped_update"]) == (4, 0)


# AbandonStep


async def test_an_abandoned_step_leaves_no_trace_in_the_next_one(model, redis_client, tmp_path):
    groups = make_groups(0, 11)
    uris = []
    for name in ("straight", "abandoned"):
        async with serving_trainer(redis_client, tmp_path / name) as trainer:
            await redis_client.flushdb()
            await trainer.open(open_run_request(model))
            await trainer.abandon(0)  # not open: a repeat
            if name == "abandoned":
                await trainer.start(0)
                await fill_stream(redis_client, 0, groups[:9])

                async def window_taken(trainer=trainer):
                    return (await trainer.get()).accumulated_group_count == 8

                await until(window_taken)
                await trainer.abandon(0)
                assert (await trainer.get()).state == pb.GetTrainerResponse.STATE_IDLE
                await redis_client.delete(keys.step_samples(RUN, 0))
            uris.append((await trainer.train(redis_client, 0, groups)).weights_uri)
    assert same_bits(*uris)


async def test_a_finished_step_cannot_be_abandoned(opened, redis_client):
    await opened.train(redis_client, 0, make_groups(0))
    await refused(opened.abandon(0), FailedPreconditionError, "STEP_FINISHED")


async def test_abandoning_ends_a_finish_step_that_waits_for_draws(opened):
    await opened.start(0)
    waiting = asyncio.create_task(opened.finish(0, draws_of(make_groups(0))))
    while not waiting.done():
        await opened.abandon(0)
        await asyncio.sleep(0.01)
    await refused(waiting, FailedPreconditionError, "STEP_NOT_OPEN")


# Fences, and what survives


async def test_a_lower_fence_changes_nothing(opened, model):
    await opened.start(0, fence=5)
    calls = {
        "open": opened.open(open_run_request(model, fence=4)),
        "start": opened.start(0, fence=4),
        "finish": opened.finish(0, [], fence=4),
        "abandon": opened.abandon(0, fence=4),
    }
    for call in calls.values():
        await refused(call, FailedPreconditionError, "STALE_FENCE")
    assert (await opened.get()).state == pb.GetTrainerResponse.STATE_ACCUMULATING
    await opened.finish(0, [], fence=5)


async def test_a_step_outlives_a_restart_of_redis(opened, redis_client, redis_server):
    groups = make_groups(0, 10)
    await opened.start(0)
    await fill_stream(redis_client, 0, groups[:3])
    redis_server.kill()
    finishing = asyncio.create_task(opened.finish(0, draws_of(groups)))
    await asyncio.sleep(0.1)
    redis_server.start()
    await fill_stream(redis_client, 0, groups[3:])
    assert (await finishing).metrics["trained_responses"] == 40


async def test_a_restarted_trainer_goes_on_from_its_checkpoint(
    model, redis_client, redis_server, tmp_path
):
    """Same weights as without the restart; the result is recorded again where it was lost."""
    async with serving_trainer(redis_client, tmp_path / "one") as trainer:
        await trainer.open(open_run_request(model))
        for step in range(3):
            last = await trainer.train(redis_client, step, make_groups(step))
    await redis_client.flushdb()
    async with serving_trainer(redis_client, tmp_path / "two") as trainer:
        await trainer.open(open_run_request(model))
        for step in range(2):
            await trainer.train(redis_client, step, make_groups(step))
    await redis_client.delete(keys.step_result(RUN, 1))
    async with serving_trainer(redis_client, tmp_path / "two") as trainer:
        opened = await trainer.open(open_run_request(model))
        assert (opened.weight_version, opened.run_snapshot_json) == (2, "after step 1")
        recorded = await SampleStream(redis_client, RUN, 1).result()
        assert recorded is not None
        assert list(recorded.draws) == draws_of(make_groups(1))
        assert await trainer.finish(1, draws_of(make_groups(1))) == recorded
        resumed = await trainer.train(redis_client, 2, make_groups(2))
    assert same_bits(resumed.weights_uri, last.weights_uri)
    assert _without_times(resumed.metrics) == _without_times(last.metrics)


async def test_updates_after_the_last_checkpoint_are_taken_back_with_their_results(
    model, redis_client, tmp_path
):
    request = open_run_request(model, trainer_settings(checkpoint_interval=2))
    async with serving_trainer(redis_client, tmp_path) as trainer:
        await trainer.open(request)
        results = [await trainer.train(redis_client, s, make_groups(s)) for s in range(3)]
    async with serving_trainer(redis_client, tmp_path) as trainer:
        opened = await trainer.open(request)
        assert (opened.weight_version, opened.run_snapshot_json) == (2, "after step 1")
        assert await SampleStream(redis_client, RUN, 1).result() == results[1]
        assert await SampleStream(redis_client, RUN, 2).result() is None
        await redis_client.delete(keys.step_samples(RUN, 2))
        again = await trainer.train(redis_client, 2, make_groups(2))
        assert _without_times(again.metrics) == _without_times(results[2].metrics)


async def test_tensors_that_are_put_away_between_steps_train_the_same(
    model, redis_client, tmp_path
):
    uris = []
    for offload in (False, True):
        await redis_client.flushdb()
        async with serving_trainer(redis_client, tmp_path / str(offload)) as trainer:
            await trainer.open(open_run_request(model, trainer_settings(offload=offload)))
            for step in range(2):
                result = await trainer.train(redis_client, step, make_groups(step))
            uris.append(result.weights_uri)
    assert same_bits(*uris)


def hold_checkpoints(trainer) -> threading.Event:
    """No checkpoint becomes complete before the event is set."""
    gate = threading.Event()
    save_tensors = trainer.leader.save_tensors

    async def save_and_hold(directory):
        written = await save_tensors(directory)
        asyncio.ensure_future(trainer.leader.in_write_thread(gate.wait))
        return written

    trainer.leader.save_tensors = save_and_hold
    return gate


async def test_finish_step_waits_for_the_checkpoint_of_its_step_but_publishes_meanwhile(
    opened, redis_client, tmp_path
):
    gate = hold_checkpoints(opened)
    training = asyncio.create_task(opened.train(redis_client, 0, make_groups(0)))

    async def published():
        return (tmp_path / "weights" / RUN / "step_000001").exists()

    await until(published)
    assert not training.done()
    gate.set()
    assert (await training).weight_version == 1
    assert (tmp_path / "checkpoints" / RUN / "step_000001" / "COMPLETE").exists()


async def test_where_some_steps_have_a_checkpoint_training_goes_on_while_one_is_written(
    trainer, model, redis_client, tmp_path
):
    """It holds the weights of its own step; the next one waits for it, and so does the end."""
    request = open_run_request(model, trainer_settings(checkpoint_interval=2))
    await trainer.open(request)
    gate = hold_checkpoints(trainer)
    for step in range(3):
        await trainer.train(redis_client, step, make_groups(step))
    checkpoints = tmp_path / "checkpoints" / RUN
    assert [path.name for path in checkpoints.iterdir()] == [".partial-000002"]
    fourth = asyncio.create_task(trainer.train(redis_client, 3, make_groups(3)))

    async def updating():
        return (await trainer.get()).state == pb.GetTrainerResponse.STATE_UPDATING

    await until(updating)
    gate.set()
    await fourth
    assert (checkpoints / "step_000002" / "COMPLETE").exists()


async def test_an_orderly_end_lets_the_update_come_to_its_end(model, redis_client, tmp_path):
    groups = make_groups(0)
    async with serving_trainer(redis_client, tmp_path) as trainer:
        await trainer.open(open_run_request(model))
        await trainer.start(0)
        await fill_stream(redis_client, 0, groups)
        gate = threading.Event()
        blocked = asyncio.create_task(trainer.leader.in_thread(gate.wait))
        finishing = asyncio.create_task(trainer.finish(0, draws_of(groups)))

        async def updating():
            return (await trainer.get()).state == pb.GetTrainerResponse.STATE_UPDATING

        await until(updating)
        finishing.add_done_callback(lambda _: gate.set())  # the server has given up the call
    await blocked
    with pytest.raises((ServiceError, asyncio.CancelledError)):
        await finishing
    async with serving_trainer(redis_client, tmp_path) as trainer:
        assert (await trainer.open(open_run_request(model))).weight_version == 1
        assert list((await trainer.finish(0, draws_of(groups))).draws) == draws_of(groups)


def _without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("_seconds")}


async def test_a_trainer_that_ends_says_why_in_one_line(redis_client, tmp_path):
    def fail():
        raise RuntimeError("ranks: [0]\nTraceback (most recent call last):\nOSError: no space\n")

    async with serving_trainer(redis_client, tmp_path) as served:
        assert served.leader is not None
        for _ in range(2):  # the work itself, and whoever comes after it
            with pytest.raises(UnavailableError) as caught:
                await served.leader.in_write_thread(fail)
            assert caught.value.message == "the trainer is ending: OSError: no space"
