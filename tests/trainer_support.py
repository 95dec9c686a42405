"""Small real things for the trainer's tests: a tiny random Llama, and groups that it sampled."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import redis.asyncio
import torch
from google.protobuf.struct_pb2 import Struct
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollpacker import wire
from rollpacker.devices.holder import Devices
from rollpacker.rpc import client
from rollpacker.rpc.server import RpcServer
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import (
    ASSISTANT,
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    ScoredResponse,
    Segment,
    StepResult,
)
from rollpacker.v1 import trainer_service_pb2 as pb
from rollpacker.v1 import trainer_service_pb2_grpc
from services.trainer.leader import Leader
from services.trainer.open_run import Roots
from services.trainer.ranks import Ranks
from services.trainer.server import TrainerServicer
from services.trainer.session import Session
from services.trainer.settings import OpenRunSettings
from tests.tiny_models import tiny_config

VOCABULARY = 17
RUN = "run-1"
MODEL_SEED = 3


def make_model(
    directory: Path,
    *,
    tied: bool = True,
    seed: int = MODEL_SEED,
    spread: float = 0.4,
    family: str = "llama",
) -> Path:
    """A random model with about 8 thousand parameters; by seed always the same one."""
    torch.manual_seed(seed)
    config = tiny_config(
        family,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        initializer_range=spread,  # wide, so that logits are far from equal
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return directory


def trainer_settings(**changes: object) -> OpenRunSettings:
    """Settings of a step of 4 prompts with 4 responses of at most 20 tokens."""
    values: dict[str, object] = {
        "learning_rate": 1e-3,
        "micro_batch_tokens": 96,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "max_response_tokens": 20,
    }
    return OpenRunSettings.model_validate(values | changes)


def settings_struct(settings: OpenRunSettings) -> Struct:
    struct = Struct()
    struct.update(settings.model_dump(mode="json"))
    return struct


def make_draw(index: int, responses: int = 4) -> Draw:
    return Draw(0, f"p{index}", tuple(range(responses)))


def make_response(
    token_ids: Sequence[int],
    *,
    index: int = 0,
    reward: float | None = 1.0,
    advantage: float = 1.0,
    logprobs: Sequence[float] | None = None,
    segments: Sequence[Segment] | None = None,
    weight_version: int = 0,
) -> ScoredResponse:
    whole = (Segment(ASSISTANT, len(token_ids), True),)
    response = Response(
        response_id=f"r{index}",
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs if logprobs is not None else [-1.0] * len(token_ids)),
        finish_reason=FinishReason.STOP,
        weight_version=weight_version,
        seed=index,
        segments=tuple(segments) if segments is not None else whole,
    )
    return ScoredResponse(response, reward, advantage)


def make_group(
    index: int, step: int = 0, *, responses: int = 4, lengths: tuple[int, int] = (1, 20)
) -> PromptGroup:
    """Group number `index`: a pure function of its arguments; advantages sum to 0."""
    noise = random.Random(index)
    rewards = [float(noise.random() < 0.5) for _ in range(responses)]
    mean = sum(rewards) / responses
    scored = [
        make_response(
            [noise.randrange(VOCABULARY) for _ in range(noise.randint(*lengths))],
            index=place,
            reward=reward,
            advantage=reward - mean,
            weight_version=step,
        )
        for place, reward in enumerate(rewards)
    ]
    prompt = tuple(noise.randrange(VOCABULARY) for _ in range(noise.randint(1, 6)))
    return PromptGroup(
        run_id=RUN,
        step=step,
        draw=make_draw(index, responses),
        prompt_token_ids=prompt,
        responses=tuple(scored),
        weight_version=step,
        race_key=max(len(item.response.token_ids) for item in scored),
    )


def weighed(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """The groups with selection weights: in turn as it is, more, not at all, less."""
    weights = itertools.cycle((1.0, 2.5, 0.0, 0.4))
    return [replace(group, selection_weight=next(weights)) for group in groups]


async def fill_stream(
    redis_client: redis.asyncio.Redis, step: int, groups: Sequence[PromptGroup]
) -> None:
    stream = SampleStream(redis_client, RUN, step)
    for group in groups:
        await stream.append(group)


@dataclass(frozen=True)
class ServedTrainer:
    """A trainer behind a real loopback server, and its calls with few words."""

    stub: trainer_service_pb2_grpc.TrainerServiceStub
    leader: Leader | None = None  # of a trainer in this process

    async def open(self, request: pb.OpenRunRequest) -> pb.OpenRunResponse:
        return await client.call(lambda: self.stub.OpenRun(request, timeout=60))

    async def start(
        self, step: int, *, fence: int = 1, weight_version: int | None = None, **values: float
    ) -> None:
        version = step if weight_version is None else weight_version
        request = pb.StartStepRequest(
            run_id=RUN, step=step, weight_version=version, fence=fence, **values
        )
        await client.call(lambda: self.stub.StartStep(request, timeout=60))

    async def finish(
        self,
        step: int,
        draws: Sequence[Draw],
        *,
        fence: int = 1,
        snapshot: str = "",
        seconds: float = 60,
    ) -> StepResult:
        request = pb.FinishStepRequest(
            run_id=RUN,
            step=step,
            draws=[wire.draw_to_proto(draw) for draw in draws],
            fence=fence,
            run_snapshot_json=snapshot or f"after step {step}",
        )
        response = await client.call(lambda: self.stub.FinishStep(request, timeout=seconds))
        return wire.step_result_from_proto(response)

    async def abandon(self, step: int, *, fence: int = 1) -> None:
        request = pb.AbandonStepRequest(run_id=RUN, step=step, fence=fence)
        await client.call(lambda: self.stub.AbandonStep(request, timeout=60))

    async def get(self) -> pb.GetTrainerResponse:
        return await client.call(lambda: self.stub.GetTrainer(pb.GetTrainerRequest(), timeout=60))

    async def save_checkpoint(self, *, fence: int = 1) -> int:
        request = pb.TrainerServiceSaveCheckpointRequest(run_id=RUN, fence=fence)
        return (
            await client.call(lambda: self.stub.SaveCheckpoint(request, timeout=60))
        ).weight_version

    async def train(
        self,
        redis_client: redis.asyncio.Redis,
        step: int,
        groups: Sequence[PromptGroup],
        **values: float,
    ) -> StepResult:
        """A whole step: start it, fill its stream, finish it."""
        await self.start(step, **values)
        await fill_stream(redis_client, step, groups)
        return await self.finish(step, draws_of(groups))


@contextlib.asynccontextmanager
async def serving_trainer(
    redis_client: redis.asyncio.Redis, directory: Path, devices: Devices | None = None
) -> AsyncIterator[ServedTrainer]:
    """A trainer of one rank in this process, with its files below `directory`."""
    torch.set_num_threads(1)
    leader = Leader(Ranks())
    roots = Roots(directory / "weights", directory / "checkpoints")
    session = Session(redis_client, leader, roots, devices)
    servicer = TrainerServicer(session, world_size=1)
    server = RpcServer(
        "127.0.0.1:0",
        ["rollpacker.v1.TrainerService"],
        lambda grpc_server: trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    await server.start()
    try:
        async with client.open_channel(server.address) as channel:
            yield ServedTrainer(trainer_service_pb2_grpc.TrainerServiceStub(channel), leader)
    finally:
        await server.stop()
        await session.close()
        await leader.close()


def draws_of(groups: Sequence[PromptGroup]) -> list[Draw]:
    return [group.draw for group in groups]


def make_groups(step: int, count: int = 5) -> list[PromptGroup]:
    """The groups of a step; no two steps have the same."""
    return [make_group(100 * step + index, step) for index in range(count)]


def open_run_request(
    model: Path,
    settings: OpenRunSettings | None = None,
    *,
    run_id: str = RUN,
    fence: int = 1,
    temperature: float = 1.0,
) -> pb.OpenRunRequest:
    return pb.OpenRunRequest(
        run_id=run_id,
        model_uri=model.absolute().as_uri(),
        trainer_settings=settings_struct(settings or trainer_settings()),
        fence=fence,
        temperature=temperature,
    )


def published_weights(weights_uri: str) -> dict[str, torch.Tensor]:
    return load_file(Path(unquote(urlsplit(weights_uri).path)) / "model.safetensors")


def same_bits(one: str, other: str) -> bool:
    """Whether two published directories hold the same weights."""
    ours, theirs = published_weights(one), published_weights(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
