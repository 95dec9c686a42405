"""Real SGLang on a CPU: `make test-sglang` installs it and runs these tests; others skip them.

A server takes the better part of a minute to start, so one engine serves a whole session; a test
that must break a server brings its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.rollout.sglang_engine import SglangEngine, SglangOptions
from tests.engine_contract import KV_BUDGET, Subject
from tests.tiny_models import save_model

PYTHON = os.environ.get("ROLLPACKER_TEST_SGLANG_PYTHON", "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


def options(**changes: Any) -> SglangOptions:
    """A small engine; requests of `tests.engine_contract` fit."""
    values = {
        "python": PYTHON,
        "slots": 64,
        "kv_budget_tokens": KV_BUDGET,
        "max_context_tokens": 4096,
        **changes,
    }
    return SglangOptions(**values)


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    return save_model(root / "v0"), save_model(root / "v1", seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def subject(directories):
    engine = SglangEngine(options())
    try:
        await engine.load_weights(directories[0])
        yield Subject(engine, *directories)
    finally:
        await engine.close()
