"""Settings: of the trainer process (environment), and of one open run (OpenRun).

`TrainerServiceSettings` is read once, when the process starts. `OpenRunSettings` is what OpenRun
carries: the `trainer` section of the run's settings, and the three numbers of other sections that
the normaliser needs. Both refuse unknown keys.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from rollpacker.devices.memory import Meter
from rollpacker.devices.settings import DeviceWorkerSettings
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.trainer_settings import TrainerSettings
from services.trainer.lora import Lora


class TrainerServiceSettings(DeviceWorkerSettings):
    """The trainer process; every rank reads the same."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="ROLLPACKER_TRAINER_")

    redis_url: str = Field(description="redis://host:port/0 or unix:///path")
    weights_root: Path = Field(description="weights are published below it")
    checkpoint_root: Path = Field(description="checkpoints are kept below it")
    device: str = Field("cpu", pattern="^(cpu|cuda)$", description="cpu or cuda")
    threads: int = Field(1, ge=1, description="torch threads of each rank")
    shard_size: int = Field(
        0, ge=0, description="ranks that hold one copy of the model; 0: all of them"
    )
    rank_timeout_seconds: float = Field(
        600, gt=0, description="how long a rank waits for another one before it gives up"
    )
    broadcast_host: str = Field(
        "",
        description="this host, as rollout hosts reach it: weights are broadcast to them by gloo,"
        " without encryption; default: they are streamed over gRPC",
    )
    broadcast_seconds: float = Field(
        60, gt=0, description="a broadcast that stalls for so long is given up"
    )

    def meter(self) -> Meter | None:
        """Of the GPUs that it claims. Raises ValueError for ranks on several hosts."""
        meter = self.meter_for(self.device)
        ranks = os.environ.get("WORLD_SIZE", "1")
        here = os.environ.get("LOCAL_WORLD_SIZE", ranks)
        if meter is not None and here != ranks:
            raise ValueError(
                f"device_leases: {here} of {ranks} ranks are on this host, and a trainer claims"
                " GPUs of its own host only; give each host's ranks GPUs of their own and set"
                " ROLLPACKER_TRAINER_DEVICE_LEASES=false"
            )
        return meter


class OpenRunSettings(TrainerSettings):
    """The `trainer` section of a run, and what the normaliser needs to know of the run."""

    prompts_per_step: int = Field(ge=1, description="P0")
    responses_per_prompt: int = Field(ge=1, description="R0")
    max_response_tokens: int = Field(ge=1, description="cap of a response, in tokens")

    @property
    def lora(self) -> Lora | None:
        """The adapter that is trained; None: all weights are."""
        if not self.lora_rank:
            return None
        return Lora(self.lora_rank, self.lora_alpha or 2 * self.lora_rank)

    def fixed_normaliser(self) -> float | None:
        """What the summed token loss is divided by; None: the step's weighed tokens."""
        responses = self.prompts_per_step * self.responses_per_prompt
        normaliser = self.resolved_normaliser
        if normaliser == "response_mean":
            return float(responses)
        if normaliser == "response_cap":
            return float(responses * self.max_response_tokens)
        if normaliser == "constant":
            return float(responses * self.normaliser_tokens)
        return None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that OpenRun fixes for a run. Two specs are the same run if their hashes are."""

    run_id: str
    model_directory: Path  # initial model
    settings: OpenRunSettings
    temperature: float  # divides the logits, as it did when the responses were sampled

    def settings_hash(self) -> str:
        """SHA-256 over settings, model and temperature; kept with every checkpoint."""
        values = {
            "model": str(self.model_directory),
            "temperature": self.temperature,
            "settings": self.settings.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parse_open_run_settings(values: Mapping[str, Any]) -> OpenRunSettings:
    """Check `trainer_settings` of OpenRun. Raises InvalidArgumentError with every problem."""
    try:
        return OpenRunSettings.model_validate(values)
    except ValidationError as error:
        violations = [_violation(item) for item in error.errors()]
        message = "; ".join(f"{name}: {what}" for name, what in violations)
        raise InvalidArgumentError("INVALID_SETTINGS", message, violations=violations) from error


def _violation(error: Any) -> tuple[str, str]:
    """One pydantic error as (field, what is wrong and how to mend it)."""
    name = ".".join(["trainer_settings", *map(str, error["loc"])])
    if error["type"] == "extra_forbidden":
        valid = sorted(OpenRunSettings.model_fields)
        close = difflib.get_close_matches(str(error["loc"][-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean `{close[0]}`?" if close else f"valid: {', '.join(valid)}"
        return name, f"unknown setting; {hint}"
    if error["type"] == "missing":
        return name, "is required"
    return name, f"{error['msg'].removeprefix('Value error, ')}, got {error['input']!r}"
