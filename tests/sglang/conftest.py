"""Real SGLang on a CPU: `make test-sglang` installs it and runs these tests; others skip them.

A server takes the better part of a minute to start, so one engine serves a whole session; a test
that must break a server brings its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from services.rollout.sglang_engine import SglangEngine
from tests.engine_contract import Subject
from tests.sglang_support import PYTHON, options
from tests.tiny_models import save_model

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


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
