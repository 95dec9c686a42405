"""Where the SGLang of `make test-sglang` is, and an engine small enough for tests."""

from __future__ import annotations

import os
from typing import Any

from services.rollout.sglang_engine import SglangOptions
from tests.engine_contract import KV_BUDGET

PYTHON = os.environ.get("ROLLPACKER_TEST_SGLANG_PYTHON", "")  # empty: there is none


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
