"""Small real things for the trainer's tests: a tiny random Llama, and groups that it sampled."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import redis.asyncio
import torch
from google.protobuf.struct_pb2 import Struct
from transformers import LlamaConfig, LlamaForCausalLM

from rollpacker.rpc.client import open_channel
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
)
from rollpacker.v1 import trainer_service_pb2 as pb
from rollpacker.v1 import trainer_service_pb2_grpc
from services.trainer.leader import Leader
from services.trainer.ranks import Ranks
from services.trainer.server import TrainerServicer
from services.trainer.session import Session
from services.trainer.settings import OpenRunSettings

VOCABULARY = 17
RUN = "run-1"
MODEL_SEED = 3


def make_model(directory: Path, *, tied: bool = True) -> Path:
    """A random Llama with about 8 thousand parameters, always the same one."""
    torch.manual_seed(MODEL_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # logits far from equal
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
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


async def fill_stream(
    client: redis.asyncio.Redis, step: int, groups: Sequence[PromptGroup]
) -> None:
    stream = SampleStream(client, RUN, step)
    for group in groups:
        await stream.append(group)


@contextlib.asynccontextmanager
async def serving_trainer(
    client: redis.asyncio.Redis, directory: Path
) -> AsyncIterator[trainer_service_pb2_grpc.TrainerServiceStub]:
    """A real trainer behind a real loopback server, in this process; one rank."""
    torch.set_num_threads(1)
    leader = Leader(Ranks())
    session = Session(client, leader, directory / "weights", directory / "checkpoints")
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
        async with open_channel(server.address) as channel:
            yield trainer_service_pb2_grpc.TrainerServiceStub(channel)
    finally:
        await server.stop()
        await leader.close()


def open_run_request(
    model: Path, settings: OpenRunSettings | None = None, *, fence: int = 1, temperature: float = 1.0
) -> pb.OpenRunRequest:
    return pb.OpenRunRequest(
        run_id=RUN,
        model_uri=model.absolute().as_uri(),
        trainer_settings=settings_struct(settings or trainer_settings()),
        fence=fence,
        temperature=temperature,
    )
