"""Fakes of the three worker services, for tests of the coordinator: real gRPC, no model.

They keep the contracts that the coordinator relies on. Lengths and rewards are pure functions of
seed and weight version, as with a real engine; the trainer's "disk" survives `restart`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from rollpacker import wire
from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InternalError,
    UnavailableError,
    stale_fence,
)
from rollpacker.rpc.server import RpcServer
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import (
    ASSISTANT,
    FinishReason,
    Response,
    ResponseTiming,
    Segment,
    StepResult,
    response_id,
)
from rollpacker.v1 import (
    reward_service_pb2,
    reward_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
    types_pb2,
)

MAX_TOKENS = 40
WEIGHT_KV_TOKENS = 1234


def fake_length(seed: int, weight_version: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{weight_version}".encode(), digest_size=4).digest()
    value = int.from_bytes(digest, "little") % 100
    return MAX_TOKENS if value < 5 else 1 + value % 17


def fake_tokens(seed: int, weight_version: int) -> tuple[int, ...]:
    """A response; behind its fifth token it depends on the weights."""
    drift = (seed // 16 + weight_version) // 3
    length = fake_length(seed, weight_version)
    return tuple((seed + i + (drift if i > 4 else 0)) % 16 for i in range(length))


class FakeRollout(rollout_service_pb2_grpc.RolloutServiceServicer):
    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.spec = wire.engine_spec_from_proto(rollout_service_pb2.EngineSpec(weight_version=-1))
        self.fence = 0
        self.fail_next = 0  # streams that break in the middle
        self.drain_next = 0  # streams that end early and hand back what runs
        self.forget_next = 0  # calls that meet an engine which has lost its weights
        self.replays = True
        self.resizes = True
        self.largest_size = 8  # for which it finds devices
        self.takes_drafts = True  # else it ignores them and tells logprobs, as SGLang does
        self.resumed_tokens = 0
        self.preempts = 0  # of the last group at tensor-parallel size 1
        self.preemption_count = 0
        self.applied = asyncio.Event()  # a spec was
        self.sizes: list[int] = []  # that were asked for, one after the other
        self.decoded_tokens = 0
        self.running = 0
        self.token_seconds = 0.0
        self.slots = 6
        self.context_tokens = 10_000  # of prompt and cap together
        self.weight_kv_tokens = WEIGHT_KV_TOKENS
        self.group_count = 0  # streams so far
        self.sampled: list[tuple[int, str, float, int]] = []  # step, prompt, temperature, cap

    def _check_fence(self, fence: int) -> None:
        if fence < self.fence:
            raise stale_fence(fence, self.fence)
        self.fence = fence

    async def ApplyEngineSpec(self, request: Any, context: Any) -> Any:
        self._check_fence(request.fence)
        if request.spec.tensor_parallel_size > self.largest_size:
            raise UnavailableError("DEVICES_BUSY", "others hold the devices")
        self.spec = wire.engine_spec_from_proto(request.spec)
        self.sizes.append(self.spec.tensor_parallel_size)
        self.applied.set()
        return rollout_service_pb2.ApplyEngineSpecResponse(spec=request.spec)

    async def GetEngine(self, request: Any, context: Any) -> Any:
        stats = rollout_service_pb2.EngineStats(
            slot_count=self.slots,
            preemption_count=self.preemption_count,
            weight_kv_tokens=self.weight_kv_tokens,
        )
        return rollout_service_pb2.GetEngineResponse(
            spec=wire.engine_spec_to_proto(self.spec),
            stats=stats,
            engine_kind="fake",
            replays_by_seed=self.replays,
            changes_tensor_parallel_size=self.resizes,
        )

    async def GenerateGroup(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._check_fence(request.fence)
        if self.forget_next:
            self.forget_next -= 1
            self.spec = wire.engine_spec_from_proto(rollout_service_pb2.EngineSpec())
            raise FailedPreconditionError("WEIGHT_VERSION_MISMATCH", "serves nothing now")
        if request.weight_version != self.spec.weight_version:
            raise FailedPreconditionError("WEIGHT_VERSION_MISMATCH", "other weights")
        prompt, cap = len(request.prompt_token_ids), request.sampling.max_response_tokens
        if prompt + cap > self.context_tokens:
            raise FailedPreconditionError("PROMPT_TOO_LONG", f"{prompt} + {cap}; lower the cap")
        whole = {
            i: fake_tokens(request.draw.seeds[i], request.weight_version) for i in request.indices
        }
        carried = {p.index: len(p.token_ids) for p in request.resume_from}
        self.resumed_tokens += sum(carried.values())
        drafts = request.drafts if self.takes_drafts else ()
        accepted = {d.index: _common_prefix(d.token_ids, whole[d.index]) for d in drafts}
        held = dict.fromkeys(whole, 0) | carried | accepted
        taken_over, told = dict(held), dict.fromkeys(whole, 0)
        open_ones = set(whole)
        self.running += 1
        self.group_count += 1
        if self.spec.tensor_parallel_size == 1:
            self.preempts += 1  # every group more than the last one
            self.preemption_count += self.preempts
        sampling = request.sampling
        self.sampled.append(
            (
                request.step,
                request.draw.prompt_id,
                sampling.temperature,
                sampling.max_response_tokens,
            )
        )
        try:
            for index in [i for i in open_ones if held[i] == len(whole[i])]:
                yield self._finished(request, index, whole[index], taken_over, accepted)
                open_ones.discard(index)
            for step in range(1, MAX_TOKENS + 1):
                await asyncio.sleep(self.token_seconds)
                if not open_ones:
                    return
                if self.fail_next and step == 3:
                    self.fail_next -= 1
                    raise UnavailableError("TEST", "the stream breaks")
                held |= {index: held[index] + 1 for index in open_ones}
                self.decoded_tokens += len(open_ones)
                yield self._progress(open_ones, whole, held, taken_over, told)
                for index in [i for i in open_ones if held[i] == len(whole[i])]:
                    yield self._finished(request, index, whole[index], taken_over, accepted)
                    open_ones.discard(index)
                if self.drain_next and step == 3:
                    self.drain_next -= 1
                    for index in open_ones:
                        prefix = whole[index][: held[index]]
                        yield self._finished(request, index, prefix, taken_over, accepted)
                    return
        finally:
            self.running -= 1

    def _progress(self, open_ones: Any, whole: Any, held: Any, taken_over: Any, told: Any) -> Any:
        new_tokens = []
        for index in open_ones:
            tokens = whole[index][told[index] : held[index]]
            logprobs = () if self.takes_drafts else (-1.0,) * len(tokens)
            new_tokens.append(
                rollout_service_pb2.NewTokens(index=index, token_ids=tokens, logprobs=logprobs)
            )
            told[index] = held[index]
        progress = rollout_service_pb2.GroupProgress(
            longest_response_tokens=max(held.values()),
            total_response_tokens=sum(held.values()),
            carried_response_tokens=sum(taken_over.values()),
            new_tokens=new_tokens,
        )
        return rollout_service_pb2.GenerateGroupResponse(progress=progress)

    def _finished(
        self, request: Any, index: int, tokens: tuple[int, ...], taken_over: Any, accepted: Any
    ) -> Any:
        """A response that holds `tokens`: all of them, or a prefix that is handed back."""
        draw = wire.draw_from_proto(request.draw)
        seed = draw.seeds[index]
        before = {p.index: p.accepted_draft_token_count for p in request.resume_from}
        is_whole = tokens == fake_tokens(seed, request.weight_version)
        response = Response(
            response_id=response_id(request.run_id, draw.id, index),
            index=index,
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            finish_reason=FinishReason.STOP if is_whole else FinishReason.INTERRUPTED,
            weight_version=request.weight_version,
            seed=seed,
            segments=(Segment(ASSISTANT, len(tokens), trainable=True),),
            carried_token_count=taken_over[index],
            accepted_draft_token_count=accepted.get(index, 0) + before.get(index, 0),
        )
        timing = ResponseTiming(1.0, 2.0, index, self.replica_id)
        finished = rollout_service_pb2.FinishedResponse(
            response=wire.response_to_proto(response), timing=wire.timing_to_proto(timing)
        )
        return rollout_service_pb2.GenerateGroupResponse(finished=finished)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    shorter = min(len(left), len(right))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


class FakeReward(reward_service_pb2_grpc.RewardServiceServicer):
    def __init__(self) -> None:
        self.unavailable = 0  # calls that fail so
        self.failing = False  # every call does, for good
        self.flipped = False  # right is wrong
        self.never_right = False
        self.asked = asyncio.Event()  # a call has come since `hold`
        self.scored_count = 0
        self.most_at_once = 0
        self._under_way = 0
        self._gate: asyncio.Event | None = None

    def hold(self) -> asyncio.Event:
        """From now on calls wait until the event is set."""
        self.asked.clear()
        self._gate = asyncio.Event()
        return self._gate

    async def ScoreResponse(self, request: Any, context: Any) -> Any:
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            return await self._score(request)
        finally:
            self._under_way -= 1

    async def _score(self, request: Any) -> Any:
        self.asked.set()
        if self._gate is not None:
            await self._gate.wait()
        if self.unavailable:
            self.unavailable -= 1
            raise UnavailableError("AWAY", "try again")
        if self.failing:
            raise InternalError("GRADER_FAILED", "no use")
        self.scored_count += 1
        correct = (len(request.response_text) % 2 == 0) != self.flipped and not self.never_right
        return reward_service_pb2.ScoreResponseResponse(
            reward=float(correct),
            verdict=types_pb2.VERDICT_CORRECT if correct else types_pb2.VERDICT_INCORRECT,
        )


@dataclass
class TrainerDisk:
    """What a trainer keeps over a restart."""

    results: dict[int, StepResult] = field(default_factory=dict)
    snapshots: dict[int, str] = field(default_factory=dict)  # by weight version


async def _nothing(_: str) -> None:
    pass


class FakeTrainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    def __init__(self, redis: Redis, disk: TrainerDisk) -> None:
        self._redis = redis
        self.disk = disk  # of the open run
        self.disks: dict[str, TrainerDisk] = {}  # of the others
        self.run_id = ""
        self.version: int | None = None
        self.open_step: int | None = None
        self.crash_after_update = 0
        self.values: dict[int, tuple[float, float]] = {}  # learning rate, temperature by step
        self.saved: list[int] = []  # versions of SaveCheckpoint
        self.before_work = _nothing  # awaited with the name of each call that needs a device
        self.abandons = asyncio.Event()  # AbandonStep waits for it
        self.abandons.set()

    def restart(self) -> None:
        self.version, self.open_step = None, None

    async def OpenRun(self, request: Any, context: Any) -> Any:
        await self.before_work("OpenRun")
        if request.run_id != self.run_id:
            self.restart()
            self.disks[self.run_id] = self.disk
            self.run_id = request.run_id
            self.disk = self.disks.get(self.run_id, TrainerDisk())
        self.version = max(self.disk.snapshots, default=0)
        return trainer_service_pb2.OpenRunResponse(
            weight_version=self.version,
            weights_uri=f"file:///fake/{self.version}",
            run_snapshot_json=self.disk.snapshots.get(self.version, ""),
        )

    async def StartStep(self, request: Any, context: Any) -> Any:
        await self.before_work("StartStep")
        if self.version is None:
            raise FailedPreconditionError("RUN_NOT_OPEN", "OpenRun comes first")
        if self.version not in (request.step, request.step + 1):
            raise FailedPreconditionError("WEIGHT_VERSION_MISMATCH", f"at {self.version}")
        self.open_step = request.step
        self.values[request.step] = (request.learning_rate, request.temperature)
        return trainer_service_pb2.StartStepResponse()

    async def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        if self.version is None:
            raise FailedPreconditionError("RUN_NOT_OPEN", "OpenRun comes first")
        self.saved.append(self.version)
        return trainer_service_pb2.TrainerServiceSaveCheckpointResponse(weight_version=self.version)

    async def FinishStep(self, request: Any, context: Any) -> Any:
        await self.before_work("FinishStep")
        draws = tuple(wire.draw_from_proto(draw) for draw in request.draws)
        if self.version is None:
            raise FailedPreconditionError("RUN_NOT_OPEN", "OpenRun comes first")
        if (result := self.disk.results.get(request.step)) is not None:
            if result.draws != draws:
                raise FailedPreconditionError("STEP_DRAWS_DIFFER", "other draws")
            return wire.step_result_to_proto(result)
        if self.open_step != request.step:
            raise FailedPreconditionError("STEP_NOT_OPEN", "StartStep comes first")
        stream = SampleStream(self._redis, request.run_id, request.step)
        groups = await stream.read_all()
        if [group.draw.id for group in groups] != [draw.id for draw in draws]:
            raise FailedPreconditionError("STEP_DRAWS_DIFFER", f"the stream has {groups}")
        tokens = sum(len(s.response.token_ids) for g in groups for s in g.responses)
        result = StepResult(
            request.step + 1,
            f"file:///fake/{request.step + 1}",
            draws,
            {"loss": 0.5, "trained_tokens": float(tokens)},
        )
        self.disk.results[request.step] = result
        self.disk.snapshots[request.step + 1] = request.run_snapshot_json
        self.version, self.open_step = request.step + 1, None
        if self.crash_after_update:
            self.crash_after_update -= 1
            self.restart()
            raise UnavailableError("TEST", "killed after the update")
        await stream.record_result(result)
        return wire.step_result_to_proto(result)

    async def AbandonStep(self, request: Any, context: Any) -> Any:
        await self.abandons.wait()
        self.open_step = None
        return trainer_service_pb2.AbandonStepResponse()


def rollout_server(servicer: FakeRollout) -> RpcServer:
    return RpcServer(
        "127.0.0.1:0",
        ["rollpacker.v1.RolloutService"],
        lambda s: rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, s),
    )


def reward_server(servicer: FakeReward) -> RpcServer:
    return RpcServer(
        "127.0.0.1:0",
        ["rollpacker.v1.RewardService"],
        lambda s: reward_service_pb2_grpc.add_RewardServiceServicer_to_server(servicer, s),
    )


def trainer_server(servicer: FakeTrainer) -> RpcServer:
    return RpcServer(
        "127.0.0.1:0",
        ["rollpacker.v1.TrainerService"],
        lambda s: trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, s),
    )
