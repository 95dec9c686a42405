"""The embedded engine keeps the contract of all engines."""

from __future__ import annotations

import pytest

from services.rollout.torch_engine import TorchEngine
from tests.engine_contract import CONTRACT, KV_BUDGET, Subject
from tests.tiny_models import save_model


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return save_model(root / "v0"), save_model(root / "v1", seed=1)


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_the_embedded_engine_keeps_the_contract(directories, rule):
    engine = TorchEngine(slots=64, kv_budget_tokens=KV_BUDGET)
    try:
        await engine.load_weights(directories[0])
        await rule(Subject(engine, *directories))
    finally:
        await engine.close()
