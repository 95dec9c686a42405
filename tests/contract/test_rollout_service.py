"""RolloutService over a real loopback channel, with the embedded engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollpacker import types, wire
from rollpacker.rpc import client, errors
from rollpacker.rpc.server import RpcServer
from rollpacker.v1 import rollout_service_pb2 as pb
from rollpacker.v1 import rollout_service_pb2_grpc, types_pb2
from services.rollout.engine import EngineError
from services.rollout.server import SERVICE_NAME, RolloutServicer, watch_engine
from services.rollout.sglang_engine.served_model import read_tensors
from services.rollout.torch_engine import TorchEngine
from services.rollout.weights_location import WeightsSource
from tests.tiny_models import CONTEXT, FOREVER, PROMPT, STOP, VOCABULARY, save_model

SEEDS = (11, 22, 33, 44)


@dataclass
class Service:
    """A running service, a stub to call it, and what is behind it."""

    stub: rollout_service_pb2_grpc.RolloutServiceStub
    channel: grpc.aio.Channel
    server: RpcServer
    engine: TorchEngine
    root: Path
    servicer: RolloutServicer

    async def apply(self, weight_version: int = 0, *, fence: int = 1, **changes):
        spec = {
            "run_id": "run",
            "weight_version": weight_version,
            "weights_uri": (self.root / f"v{weight_version % 2}").as_uri(),
            "memory_state": pb.MEMORY_STATE_RESIDENT,
            **changes,
        }
        request = pb.ApplyEngineSpecRequest(spec=pb.EngineSpec(**spec), fence=fence)
        return await client.call(lambda: self.stub.ApplyEngineSpec(request, timeout=60))

    def stream(self, timeout: float = 60, **changes) -> AsyncIterator[pb.GenerateGroupResponse]:
        request = group_request(**changes)
        return client.stream(lambda: self.stub.GenerateGroup(request, timeout=timeout))

    async def generate(self, **changes) -> dict[int, types_pb2.Response]:
        """Responses by index."""
        return {
            message.finished.response.index: message.finished.response
            async for message in self.stream(**changes)
            if message.HasField("finished")
        }

    async def engine_now(self) -> pb.GetEngineResponse:
        return await client.call(lambda: self.stub.GetEngine(pb.GetEngineRequest(), timeout=60))

    async def until_idle(self) -> None:
        while (stats := (await self.engine_now()).stats).running_response_count or (
            stats.waiting_response_count
        ):
            await asyncio.sleep(0.01)


def draw(**changes) -> types_pb2.Draw:
    return types_pb2.Draw(**{"epoch": 2, "prompt_id": "p7", "seeds": SEEDS, **changes})


def sampling(**changes) -> types_pb2.SamplingParameters:
    values = {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_response_tokens": 60,
        "stop_token_ids": [STOP],
        **changes,
    }
    return types_pb2.SamplingParameters(**values)


def group_request(**changes) -> pb.GenerateGroupRequest:
    values = {
        "run_id": "run",
        "fence": 1,
        "draw": draw(),
        "prompt_token_ids": PROMPT,
        "weight_version": 0,
        "sampling": sampling(),
        **changes,
    }
    return pb.GenerateGroupRequest(**values)


def endless(cap: int = FOREVER, **changes) -> dict[str, object]:
    return {"sampling": sampling(stop_token_ids=[], max_response_tokens=cap), **changes}


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    save_model(root / "v0")
    save_model(root / "v1", seed=1)
    return root


@asynccontextmanager
async def running_service(root: Path, **settings):
    engine = TorchEngine(**{"slots": 64, "dtype": "float64", **settings})
    servicer = RolloutServicer(engine, replica_id="rollout-0", weights=WeightsSource(root))
    server = RpcServer(
        "127.0.0.1:0",
        [SERVICE_NAME],
        lambda grpc_server: rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    await server.start()
    await server.set_serving(True)
    channel = client.open_channel(server.address)
    stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
    try:
        yield Service(stub, channel, server, engine, root, servicer)
    finally:
        await channel.close()
        await server.stop()
        await engine.close()


@pytest.fixture
async def service(weights_root):
    async with running_service(weights_root) as service:
        yield service


async def test_a_group_comes_back_whole(service):
    await service.apply()
    responses = await service.generate()
    assert sorted(responses) == [0, 1, 2, 3]
    for index, message in responses.items():
        response = wire.response_from_proto(message)  # checks tokens against logprobs
        assert response.response_id == f"run:2:p7:{index:04d}"
        assert response.seed == SEEDS[index]
        assert response.weight_version == 0
        assert response.segments == (
            types.Segment(types.ASSISTANT, len(response.token_ids), trainable=True),
        )
        assert response.carried_token_count == 0
        if response.finish_reason is types.FinishReason.STOP:
            assert response.token_ids[-1] == STOP
        else:
            assert len(response.token_ids) == 60


async def test_the_same_request_gives_the_same_responses_also_at_once(service):
    await service.apply()
    first, second = await asyncio.gather(service.generate(), service.generate())
    assert first == second


async def test_indices_choose_responses_and_name_their_seeds(service):
    await service.apply()
    everything = await service.generate()
    assert await service.generate(indices=[3, 1]) == {i: everything[i] for i in (3, 1)}


async def test_timing_names_replica_and_slot(service):
    await service.apply()
    finished = [m.finished async for m in service.stream() if m.HasField("finished")]
    for message in finished:
        timing = wire.timing_from_proto(message.timing)
        assert timing.replica_id == "rollout-0"
        assert 0 <= timing.slot < 64
        assert timing.start_time <= timing.end_time


async def test_progress_comes_once_per_interval_of_the_longest_response(service):
    await service.apply()
    longest = [
        message.progress.longest_response_tokens
        async for message in service.stream(**endless(cap=300, progress_interval_tokens=10))
        if message.HasField("progress")
    ]
    assert longest == list(range(10, 300, 10))


async def test_a_resumed_response_goes_on_exactly(service):
    await service.apply()
    whole = (await service.generate(indices=[2]))[2]
    prefix = types_pb2.Response()
    prefix.CopyFrom(whole)
    del prefix.token_ids[4:], prefix.logprobs[4:]
    prefix.segments[0].token_count = 4
    prefix.finish_reason = types_pb2.FINISH_REASON_INTERRUPTED
    resumed = (await service.generate(indices=[2], resume_from=[prefix]))[2]
    assert resumed.carried_token_count == 4
    assert resumed.token_ids == whole.token_ids
    assert resumed.finish_reason == whole.finish_reason


async def test_a_draft_changes_the_time_of_a_response_but_not_the_response(service):
    await service.apply(0)
    of_zero = await service.generate()
    await service.apply(1)
    fresh = await service.generate(weight_version=1)
    drafts = [types_pb2.Draft(index=i, token_ids=r.token_ids) for i, r in of_zero.items()]
    drafted = await service.generate(weight_version=1, drafts=drafts)
    again = await service.generate(
        weight_version=1,
        drafts=[types_pb2.Draft(index=i, token_ids=r.token_ids) for i, r in fresh.items()],
    )
    for index, expected in fresh.items():
        for response in (drafted[index], again[index]):
            assert list(response.token_ids) == list(expected.token_ids)
            assert response.logprobs == pytest.approx(list(expected.logprobs), abs=1e-6)
            assert response.accepted_draft_token_count == response.carried_token_count
        assert again[index].carried_token_count == len(expected.token_ids)


async def test_progress_carries_the_tokens_that_a_cancelled_group_leaves_behind(service):
    await service.apply()
    told: dict[int, list[int]] = {index: [] for index in range(4)}
    finished = {}
    async for message in service.stream(**endless(cap=50, progress_interval_tokens=10)):
        if message.HasField("progress"):
            for new in message.progress.new_tokens:
                told[new.index] += new.token_ids
        else:
            finished[message.finished.response.index] = list(message.finished.response.token_ids)
    assert {index: tokens[:40] for index, tokens in finished.items()} == told


async def test_a_service_that_ends_hands_back_prefixes_that_go_on_elsewhere(service, weights_root):
    await service.apply()
    stream = service.stream(**endless(progress_interval_tokens=1))
    await anext(stream)
    ending = asyncio.create_task(service.servicer.hand_back_at_the_end())
    await asyncio.sleep(0)
    ending.cancel()
    prefixes = [m.finished.response async for m in stream if m.HasField("finished")]
    assert {r.finish_reason for r in prefixes} == {types_pb2.FINISH_REASON_INTERRUPTED}
    with pytest.raises(errors.FailedPreconditionError, match="serves nothing"):
        await service.generate()
    async with running_service(weights_root) as other:
        await other.apply()
        cap = max(len(prefix.token_ids) for prefix in prefixes) + 20
        expected = await other.generate(**endless(cap))
        resumed = await other.generate(**endless(cap), resume_from=prefixes)
    for prefix in prefixes:
        response = resumed[prefix.index]
        assert response.carried_token_count == len(prefix.token_ids) > 0
        assert list(response.token_ids) == list(expected[prefix.index].token_ids)
        assert response.logprobs == pytest.approx(list(expected[prefix.index].logprobs), abs=1e-6)


async def test_the_engine_reports_its_spec_and_kind(service):
    before = await service.engine_now()
    assert before.spec.weight_version == -1
    assert (before.engine_kind, before.replays_by_seed) == ("torch", True)
    applied = await service.apply(1)
    now = await service.engine_now()
    assert now.spec == applied.spec
    assert now.spec.weight_version == 1
    assert now.spec.memory_state == pb.MEMORY_STATE_RESIDENT
    assert now.stats.slot_count == 64


async def test_the_engine_tells_how_many_kv_tokens_weigh_as_much_as_its_weights(service):
    tensors = read_tensors([service.root / "v0" / "model.safetensors"])
    numbers = sum(t.numel() for name, t in tensors.items() if "embed_tokens" not in name)
    of_token = 2 * 2 * 2 * 8  # keys and values, layers, heads, numbers of a head
    await service.apply()
    assert (await service.engine_now()).stats.weight_kv_tokens == round(numbers / of_token) > 0
    await service.apply(memory_state=pb.MEMORY_STATE_RELEASED)
    assert (await service.engine_now()).stats.weight_kv_tokens == 0


async def test_applying_the_spec_in_force_disturbs_nothing(service):
    first = await service.apply()
    stream = service.stream(**endless(cap=300, progress_interval_tokens=1))
    await anext(stream)
    assert (await service.apply()).spec == first.spec
    reasons = [m.finished.response.finish_reason async for m in stream if m.HasField("finished")]
    assert reasons == [types_pb2.FINISH_REASON_LENGTH] * 4


async def test_other_weights_interrupt_what_runs_and_then_serve(service):
    await service.apply(0)
    of_zero = await service.generate()
    stream = service.stream(**endless(progress_interval_tokens=1))
    await anext(stream)
    await service.apply(1)
    interrupted = [m.finished.response async for m in stream if m.HasField("finished")]
    assert {r.finish_reason for r in interrupted} == {types_pb2.FINISH_REASON_INTERRUPTED}
    assert all(0 < len(r.token_ids) < FOREVER for r in interrupted)
    of_one = await service.generate(weight_version=1)
    assert [list(r.token_ids) for r in of_one.values()] != [
        list(r.token_ids) for r in of_zero.values()
    ]


async def test_applying_goes_on_when_its_caller_gives_up(service):
    await service.apply(0)
    spec = pb.EngineSpec(
        run_id="run",
        weight_version=1,
        weights_uri=(service.root / "v1").as_uri(),
        memory_state=pb.MEMORY_STATE_RESIDENT,
    )
    stream = service.stream(**endless(progress_interval_tokens=1))
    await anext(stream)
    call = service.stub.ApplyEngineSpec(pb.ApplyEngineSpecRequest(spec=spec, fence=1), timeout=60)
    async for message in stream:
        if message.HasField("finished"):  # the new weights interrupt it: applying has begun
            call.cancel()
    while (await service.engine_now()).spec != spec:
        await asyncio.sleep(0.01)
    assert await service.generate(weight_version=1)


async def test_other_weights_are_refused(service):
    with pytest.raises(errors.FailedPreconditionError) as refused:
        await service.generate()
    assert refused.value.reason == "WEIGHT_VERSION_MISMATCH"
    await service.apply(0)
    for changes in ({"weight_version": 1}, {"run_id": "another"}):
        with pytest.raises(errors.FailedPreconditionError) as refused:
            await service.generate(**changes)
        assert refused.value.reason == "WEIGHT_VERSION_MISMATCH"


async def test_released_memory_takes_no_work_until_it_is_resident_again(service):
    await service.apply(0)
    before = await service.generate()
    await service.apply(0, memory_state=pb.MEMORY_STATE_RELEASED)
    assert (await service.engine_now()).spec.memory_state == pb.MEMORY_STATE_RELEASED
    with pytest.raises(errors.FailedPreconditionError) as refused:
        await service.generate()
    assert refused.value.reason == "WEIGHT_VERSION_MISMATCH"
    await service.apply(0)
    assert await service.generate() == before


async def test_an_older_fence_is_refused(service):
    await service.apply(fence=5)
    with pytest.raises(errors.FailedPreconditionError) as refused:
        await service.apply(1, fence=4)
    assert refused.value.reason == "STALE_FENCE"
    with pytest.raises(errors.FailedPreconditionError) as refused:
        await service.generate(fence=4)
    assert refused.value.reason == "STALE_FENCE"
    assert await service.generate(fence=6)
    with pytest.raises(errors.FailedPreconditionError):
        await service.apply(fence=5)


async def test_a_prompt_that_can_never_fit_is_refused(service):
    await service.apply()
    with pytest.raises(errors.FailedPreconditionError, match=f"context is {CONTEXT}") as refused:
        await service.generate(prompt_token_ids=[5] * (CONTEXT - 59))
    assert refused.value.reason == "PROMPT_TOO_LONG"


async def test_a_kv_budget_below_one_response_is_named(weights_root):
    async with running_service(weights_root, kv_budget_tokens=64) as service:
        await service.apply()
        with pytest.raises(errors.FailedPreconditionError, match="KV budget is 64") as refused:
            await service.generate()
        assert refused.value.reason == "PROMPT_TOO_LONG"


async def test_missing_and_damaged_weights_are_not_found_and_the_old_ones_stay(service):
    await service.apply()
    before = await service.generate()
    damaged = service.root / "damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / "config.json").write_bytes((service.root / "v0" / "config.json").read_bytes())
    tensors = (service.root / "v0" / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(tensors[: len(tensors) // 2])
    for uri in ((service.root / "v9").as_uri(), damaged.as_uri()):
        with pytest.raises(errors.NotFoundError) as missing:
            await service.apply(2, weights_uri=uri)
        assert missing.value.reason == "WEIGHTS_NOT_FOUND"
    assert (await service.engine_now()).spec.weight_version == 0
    assert await service.generate() == before


@pytest.mark.parametrize("way", ["absolute", "dots", "link", "linked_file"])
async def test_weights_outside_the_root_are_refused(service, tmp_path, way):
    outside = save_model(tmp_path / "outside")
    uri = outside.as_uri()
    if way == "dots":
        uri = f"{service.root.as_uri()}/v0/../../{'../' * 20}{outside}"
    elif way == "link":
        link = service.root / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
        uri = link.as_uri()
    elif way == "linked_file":
        place = service.root / f"linked_{tmp_path.name}"
        place.mkdir()
        (place / "config.json").symlink_to(outside / "config.json")
        (place / "model.safetensors").symlink_to(outside / "model.safetensors")
        uri = place.as_uri()
    with pytest.raises(errors.PermissionDeniedError) as refused:
        await service.apply(weights_uri=uri)
    assert refused.value.reason == "WEIGHTS_OUTSIDE_ROOT"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("spec.weights_uri", {"weights_uri": "s3://bucket/weights"}),
        ("spec.weights_uri", {"weights_uri": "/plain/path"}),
        ("spec.weights_uri", {"weights_uri": "file://elsewhere/weights"}),
        ("spec.weight_version", {"weight_version": -1}),
        ("spec.tensor_parallel_size", {"tensor_parallel_size": 2}),
        ("spec.tensor_parallel_size", {"tensor_parallel_size": -1}),
        ("spec.run_id", {"run_id": ""}),
    ],
)
async def test_a_wrong_field_of_a_spec_is_named(service, field, changes):
    with pytest.raises(errors.InvalidArgumentError) as refused:
        await service.apply(**{"weight_version": 0, **changes})
    assert [name for name, _ in refused.value.violations] == [field]


def interrupted(**changes) -> types_pb2.Response:
    values = {
        "response_id": "run:2:p7:0001",
        "index": 1,
        "token_ids": [5, 6],
        "logprobs": [-1.0, -2.0],
        "finish_reason": types_pb2.FINISH_REASON_INTERRUPTED,
        "seed": SEEDS[1],
        "segments": [types_pb2.Segment(role="assistant", token_count=2, trainable=True)],
        **changes,
    }
    return types_pb2.Response(**values)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("run_id", {"run_id": ""}),
        ("draw.prompt_id", {"draw": draw(prompt_id="")}),
        ("draw.seeds", {"draw": draw(seeds=[])}),
        ("draw.seeds", {"draw": draw(seeds=[2**63])}),
        ("prompt_token_ids", {"prompt_token_ids": []}),
        ("prompt_token_ids", {"prompt_token_ids": [VOCABULARY]}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}),
        ("sampling.temperature", {"sampling": sampling(temperature=0)}),
        ("sampling.temperature", {"sampling": sampling(temperature=float("nan"))}),
        ("sampling.temperature", {"sampling": None}),
        ("sampling.top_p", {"sampling": sampling(top_p=0.9)}),
        ("sampling.top_k", {"sampling": sampling(top_k=5)}),
        ("sampling.max_response_tokens", {"sampling": sampling(max_response_tokens=0)}),
        ("indices", {"indices": [4]}),
        ("indices", {"indices": [-1]}),
        ("indices", {"indices": [1, 1]}),
        ("progress_interval_tokens", {"progress_interval_tokens": -1}),
        ("resume_from[0].weight_version", {"resume_from": [interrupted(weight_version=1)]}),
        ("resume_from[0].seed", {"resume_from": [interrupted(seed=5)]}),
        ("resume_from[0].index", {"resume_from": [interrupted()], "indices": [0]}),
        ("resume_from[1].index", {"resume_from": [interrupted(), interrupted()]}),
        ("resume_from[0]", {"resume_from": [interrupted(logprobs=[-1.0])]}),
        ("resume_from[0]", {"resume_from": [interrupted(logprobs=[-1.0, 0.5])]}),
        (
            "resume_from[0].finish_reason",
            {"resume_from": [interrupted(finish_reason=types_pb2.FINISH_REASON_STOP)]},
        ),
        ("resume_from[0].token_ids", {"resume_from": [interrupted(token_ids=[5, STOP])]}),
        (
            "resume_from[0].token_ids",
            {"resume_from": [interrupted()], "sampling": sampling(max_response_tokens=2)},
        ),
        ("resume_from.token_ids", {"resume_from": [interrupted(token_ids=[5, VOCABULARY])]}),
        ("drafts[0].index", {"drafts": [types_pb2.Draft(index=4)]}),
        ("drafts[1].index", {"drafts": [types_pb2.Draft(index=1)] * 2}),
        (
            "drafts[0].index",
            {
                "resume_from": [interrupted()],
                "drafts": [types_pb2.Draft(index=interrupted().index)],
            },
        ),
        (
            "drafts.token_ids",
            {"drafts": [types_pb2.Draft(index=1, token_ids=[VOCABULARY])]},
        ),
    ],
)
async def test_a_wrong_field_of_a_group_is_named(service, field, changes):
    await service.apply()
    with pytest.raises(errors.InvalidArgumentError) as refused:
        await service.generate(**changes)
    assert [name for name, _ in refused.value.violations] == [field]
    assert refused.value.violations[0][1]


async def test_cancelling_the_stream_frees_the_slots(service):
    await service.apply()
    stream = service.stream(**endless(progress_interval_tokens=1))
    await anext(stream)
    await stream.aclose()
    await service.until_idle()
    stats = (await service.engine_now()).stats
    assert stats.kv_cache_usage == 0
    assert stats.generated_token_count < 4 * FOREVER


async def test_a_deadline_ends_the_call_and_frees_the_slots(service):
    await service.apply()
    many = draw(seeds=range(1, 65))
    with pytest.raises(errors.DeadlineExceededError):
        async for _ in service.stream(timeout=0.05, **endless(draw=many)):
            pass
    await service.until_idle()


async def test_messages_above_4_mib_pass(service):
    """A long prompt, in and refused by length, not by size of the message."""
    await service.apply()
    request = group_request(prompt_token_ids=[5] * 5 * 1024 * 1024)
    assert request.ByteSize() > 4 * 1024 * 1024
    with pytest.raises(errors.FailedPreconditionError) as refused:
        async for _ in client.stream(lambda: service.stub.GenerateGroup(request, timeout=60)):
            pass
    assert refused.value.reason == "PROMPT_TOO_LONG"


async def test_300_groups_run_at_once(service):
    await service.apply()
    results = await asyncio.gather(
        *(
            service.generate(timeout=250, draw=draw(prompt_id=f"p{n}", seeds=[2 * n, 2 * n + 1]))
            for n in range(300)
        )
    )
    assert [sorted(responses) for responses in results] == [[0, 1]] * 300
    alone = await service.generate(draw=draw(prompt_id="p150", seeds=[300, 301]))
    assert alone == results[150]


async def test_a_broken_engine_fails_its_callers_and_stops_serving(service):
    """The exception is a real one: the model's rotary table ends before the sequence does."""
    await service.apply()
    watcher = asyncio.create_task(watch_engine(service.engine, service.server))
    decoder = service.engine._core._runner._decoder
    decoder._cosine = decoder._cosine[: len(PROMPT) + 20]
    with pytest.raises(errors.UnavailableError) as failed:
        await service.generate(**endless())
    assert failed.value.reason == "ENGINE_FAILED"
    with pytest.raises(EngineError):
        await watcher
    health = health_pb2_grpc.HealthStub(service.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(errors.UnavailableError):
        await service.generate()
    with pytest.raises(errors.UnavailableError):
        await service.apply(1)


async def test_an_engine_that_hangs_fails_its_callers_and_stops_serving(weights_root, monkeypatch):
    release = threading.Event()
    async with running_service(weights_root, silence_seconds=1) as service:
        await service.apply()
        watch = asyncio.ensure_future(watch_engine(service.engine, service.server))
        stream = service.stream(**endless())
        await anext(stream)
        monkeypatch.setattr(service.engine._core, "step", release.wait)
        with pytest.raises(errors.UnavailableError, match="no step for 1 s") as failed:
            async for _ in stream:
                pass
        assert failed.value.reason == "ENGINE_FAILED"
        with pytest.raises(EngineError, match="no step"):
            await watch
        release.set()
