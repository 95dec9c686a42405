"""Families that only SGLang serves: what the trainer publishes is what it loads and samples from.

A server for each family, so this costs a minute each.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from services.rollout.sglang_engine import SglangEngine
from services.trainer.ranks import Ranks
from services.trainer.replica import GatherWeights, Open, Replica, WholeWeights
from services.trainer.weight_publisher import WeightPublisher
from tests.engine_contract import ENDLESS, TOLERANCE, Subject, seeded, worst_logprob_difference
from tests.sglang_support import options
from tests.tiny_models import SGLANG_FAMILIES, save_model
from tests.trainer_support import trainer_settings

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(600)]


def published(model: Path, root: Path, version: int) -> Path:
    """The weights of a trainer that was opened on the model."""
    torch.set_num_threads(1)
    replica = Replica(Ranks())
    replica.execute(Open(model, trainer_settings(), 1.0, None))
    whole = replica.execute(GatherWeights())
    assert isinstance(whole, WholeWeights)
    uri = WeightPublisher(root, model).publish(version, whole.tensors, whole.config)
    return Path(urlsplit(uri).path)


@pytest.mark.parametrize("family", SGLANG_FAMILIES)
async def test_published_weights_are_served_in_place_and_proven(tmp_path: Path, family: str):
    versions = [
        published(save_model(tmp_path / str(seed), family, seed=seed), tmp_path / "weights", seed)
        for seed in (0, 1)
    ]
    engine = SglangEngine(options())
    try:
        for directory in versions:
            await engine.load_weights(directory)
            subject = Subject(engine, directory, directory)
            results = await subject.run(seeded(8, temperature=0.7, stop_token_ids=ENDLESS))
            worst = worst_logprob_difference(directory, results.values(), 0.7)
            print(f"{family}: largest logprob difference from a float64 forward {worst:.2e}")
            assert worst < TOLERANCE
        assert engine.replays_by_seed
    finally:
        await engine.close()
