"""Settings of one rollout replica (environment, prefix ROLLPACKER_ROLLOUT_)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rollpacker.settings import WorkerSettings


class RolloutServiceSettings(WorkerSettings):
    """Which engine runs, and how much it may hold."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="ROLLPACKER_ROLLOUT_")

    weights_root: Path = Field(description="weights are loaded from below it only")
    engine: Literal["torch"] = Field("torch", description="the embedded engine")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    slots: int = Field(512, ge=1, description="responses decoded at once")
    kv_budget_tokens: int = Field(
        262_144, ge=2, description="tokens, prompts included, whose keys and values are kept"
    )
    max_context_tokens: int = Field(
        0, ge=0, description="cap of prompt and response together; 0: the model's own"
    )
    threads: int = Field(1, ge=1, description="CPU threads of one tensor operation")
