"""The embedded engine: a response is a function of weights, prompt, seed and parameters."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rollpacker import sampling
from rollpacker.types import FinishReason
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
    PromptTooLongError,
    WeightsNotFoundError,
)
from services.rollout.torch_engine import TorchEngine

VOCABULARY = 17
STOP = 3
PROMPT = (5, 6, 7, 8, 9)
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def save_model(directory: Path, family: str = "llama", *, seed: int = 0, **changes) -> Path:
    """A tiny random model; wide weights, so that its next-token laws are far from uniform."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        **changes,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**values))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
async def make_engine(model_directory):
    engines = []

    async def make(directory: Path = model_directory, **settings) -> TorchEngine:
        engine = TorchEngine(**{"dtype": "float64", "slots": 64, **settings})
        engines.append(engine)
        await engine.load_weights(directory)
        return engine

    yield make
    for engine in engines:
        await engine.close()


def request(seed: int = 1, **changes) -> GenerationRequest:
    values = {
        "request_id": f"r{seed}",
        "prompt_token_ids": PROMPT,
        "seed": seed,
        "temperature": 1.0,
        "max_response_tokens": 60,
        "stop_token_ids": frozenset({STOP}),
        **changes,
    }
    return GenerationRequest(**values)


def seeded(count: int, **changes) -> list[GenerationRequest]:
    return [request(seed, **changes) for seed in range(1, count + 1)]


async def run(engine: TorchEngine, requests) -> dict[str, GenerationResult]:
    """The results of one group, by request id."""
    return {
        event.request_id: event
        async for event in engine.generate(requests, 16)
        if isinstance(event, GenerationResult)
    }


def essence(result: GenerationResult):
    return result.token_ids, result.finish_reason


def reference_logits(directory: Path, tokens, dtype=torch.float64) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a transformers forward pass."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


async def test_a_response_is_what_the_definition_says(make_engine, model_directory):
    """Token by token, from transformers' logits and the noise in plain numbers."""
    result = (await run(await make_engine(), [request(7, temperature=0.8)]))["r7"]
    sequence = [*PROMPT]
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        logits = reference_logits(model_directory, sequence)[-1] / 0.8
        state = sampling.seed_state(7)
        noise = [
            float(sampling.gumbel(sampling.noise_bits(state, len(sequence) - 1, v)))
            for v in range(VOCABULARY)
        ]
        law = logits.log_softmax(-1)
        assert int((law + torch.tensor(noise)).argmax()) == token
        assert logprob == pytest.approx(float(law[token]), abs=1e-5)
        sequence.append(token)
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] == STOP


async def test_a_response_is_the_same_alone_and_in_a_batch_of_64(make_engine):
    batch = await run(await make_engine(), seeded(64))
    engine = await make_engine()
    for each in seeded(64)[::9]:
        alone = await run(engine, [each])
        assert essence(alone[each.request_id]) == essence(batch[each.request_id])
    assert len({result.token_ids for result in batch.values()}) > 32


async def test_a_preempted_response_goes_on_as_it_would_have(make_engine):
    undisturbed = await run(await make_engine(), seeded(16, stop_token_ids=frozenset()))
    engine = await make_engine(kv_budget_tokens=300)
    squeezed = await run(engine, seeded(16, stop_token_ids=frozenset()))
    assert engine.stats().preemption_count > 0
    for name, result in undisturbed.items():
        assert essence(squeezed[name]) == essence(result)
        assert squeezed[name].logprobs == pytest.approx(result.logprobs, abs=1e-9)
        assert squeezed[name].carried_token_count == 0


async def test_a_moved_response_goes_on_as_it_would_have(make_engine):
    whole = (await run(await make_engine(), [request(5)]))["r5"]
    engine = await make_engine()
    for length in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        carried = request(
            5,
            carried_token_ids=whole.token_ids[:length],
            carried_logprobs=whole.logprobs[:length],
            carried_near_ties=2,
        )
        moved = (await run(engine, [carried]))["r5"]
        assert essence(moved) == essence(whole)
        assert moved.logprobs == pytest.approx(whole.logprobs, abs=1e-9)
        assert moved.carried_token_count == length
        assert moved.near_tie_count == whole.near_tie_count + 2
