"""Replicas that do not see the trainer's weights: real processes, the weights come over gRPC."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.real_runs import proof_settings, running_stack, trained_draws
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(300)

PROMPTS, STEPS = 12, 3


async def test_replicas_that_do_not_see_the_weights_receive_every_version(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    settings = {"weights_root": elsewhere}
    async with running_stack(tmp_path, rollouts=2, rollout_settings=settings) as real:
        trace = await real.run("apart", proof_settings(tmp_path, PROMPTS))
    assert max(Counter(trained_draws(trace)).values()) == 1
    assert len(trained_draws(trace)) == PROMPTS
    received = {path.parent.name for path in elsewhere.rglob("model.safetensors")}
    assert f"step_{STEPS - 1:06d}" in received
    for path in elsewhere.rglob("model.safetensors"):
        published = tmp_path / "weights" / "apart" / path.parent.name / path.name
        assert path.read_bytes() == published.read_bytes()
