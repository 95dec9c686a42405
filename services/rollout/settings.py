"""Settings of one rollout replica (environment, prefix ROLLPACKER_ROLLOUT_)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from rollpacker.devices.memory import Meter
from rollpacker.devices.settings import DeviceWorkerSettings


class RolloutServiceSettings(DeviceWorkerSettings):
    """Which engine runs, and how much it may hold."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="ROLLPACKER_ROLLOUT_")

    weights_root: Path = Field(description="weights are loaded from below it only")
    refit_seconds: float = Field(
        300.0, gt=0, description="weights that are not below weights_root must arrive within"
    )
    broadcast_host: str = Field(
        "",
        description="this host, as the trainer and other replicas reach it: weights are received by"
        " a gloo broadcast, without encryption; default: they are streamed over gRPC",
    )
    engine: Literal["torch", "sglang"] = Field(
        "torch", description="torch: the embedded engine; sglang: an SGLang server"
    )
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="cpu; cuda: GPUs that it claims; cuda:N: that one, without asking",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    slots: int = Field(512, ge=1, description="responses decoded at once")
    kv_budget_tokens: int = Field(
        262_144, ge=2, description="tokens, prompts included, whose keys and values are kept"
    )
    max_context_tokens: int = Field(
        0, ge=0, description="cap of prompt and response together; 0: the model's own"
    )
    device_count: int = Field(
        1, ge=1, description="GPUs that it claims where the run names no tensor-parallel size"
    )
    threads: int = Field(1, ge=1, description="CPU threads of one tensor operation")
    silence_seconds: float = Field(
        300.0, gt=0, description="the embedded engine hangs when it makes no step for so long"
    )
    sglang_python: str = Field(
        "", description="interpreter that has SGLang; default: the one of this service"
    )
    sglang_url: str = Field(
        "", description="an SGLang server to attach to; default: one is launched and kept alive"
    )
    sglang_arguments: tuple[str, ...] = Field(
        (), description="more arguments of sglang.launch_server, as a JSON list"
    )
    sglang_start_seconds: float = Field(
        600.0, gt=0, description="a server that is not ready by then is given up"
    )
    sglang_silence_seconds: float = Field(
        60.0, gt=0, description="without a token for so long, a server with work is probed"
    )

    def meter(self) -> Meter | None:
        """Of the GPUs that it claims; an attached server has its own already."""
        return None if self.sglang_url else self.meter_for(self.device)

    @model_validator(mode="after")
    def _fits_engine(self) -> Self:
        if self.engine == "sglang" and self.dtype == "float64":
            raise ValueError("dtype: float64 is not one of SGLang's; use float32 or bfloat16")
        return self
