"""The trainer's first forward pass sees the probabilities that the embedded engine sampled from."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.rollout.engine import GenerationRequest, GenerationResult
from services.rollout.torch_engine import TorchEngine
from services.trainer.model import PolicyModel
from services.trainer.packing import StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.step_accumulator import StepAccumulator
from tests.tiny_models import PROMPT, STOP, save_model
from tests.trainer_support import make_group, make_response, trainer_settings


async def sampled_group(directory, temperature):
    """Eight responses of the embedded engine to one prompt, as the trainer gets them."""
    engine = TorchEngine(dtype="float32", slots=8)
    try:
        await engine.load_weights(directory)
        requests = [
            GenerationRequest(
                request_id=f"r{seed}",
                prompt_token_ids=PROMPT,
                seed=seed,
                temperature=temperature,
                max_response_tokens=60,
                stop_token_ids=frozenset({STOP}),
            )
            for seed in range(8)
        ]
        results = [
            e async for e in engine.generate(requests, 16) if isinstance(e, GenerationResult)
        ]
    finally:
        await engine.close()
    responses = tuple(
        make_response(result.token_ids, logprobs=result.logprobs, advantage=float(place) - 3.5)
        for place, result in enumerate(results)
    )
    return dataclasses.replace(make_group(0), prompt_token_ids=PROMPT, responses=responses)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_first_ratio_is_one_within_a_thousandth(tmp_path, family, temperature):
    torch.set_num_threads(1)
    directory = save_model(tmp_path, family)
    group = await sampled_group(directory, temperature)
    settings = trainer_settings(old_logprobs="rollout", micro_batch_tokens=200)
    model = PolicyModel(directory, "float32", torch.device("cpu"), None)
    packer = StreamPacker(1, settings.micro_batch_tokens)
    packer.add(group)
    ((window,),) = packer.flush()
    for trained_at, agrees in {temperature: True, 1.7 * temperature: False}.items():
        accumulator = StepAccumulator(model, settings, trained_at, Ranks())
        for batch in window.micro_batches:
            accumulator.add(batch)
        sums = accumulator.sums()
        assert sums.trained_tokens == packer.trained_tokens > 8
        assert (sums.mismatch_ratio_max < 1 + 1e-3) == agrees
        assert (sums.per_token(sums.mismatch_kl) < 1e-6) == agrees
        assert (sums.clipped_tokens == 0) == agrees
