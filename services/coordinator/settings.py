"""Settings of the coordinator process (environment, prefix ROLLPACKER_COORDINATOR_)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rollpacker.settings import ServiceSettings


class CoordinatorSettings(ServiceSettings):
    """Where the coordinator keeps things and how long it waits."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="ROLLPACKER_COORDINATOR_"
    )

    redis_url: str = Field(description="redis://host:port/0 or unix:///path")
    run_directory: Path = Field(Path("runs"), description="outputs of runs, one directory per run")
    coordinator_id: str = Field(
        "coordinator-0", description="holder of the lease; stable over restarts, unique otherwise"
    )
    coordinator_lease_seconds: float = Field(10, gt=0, description="a standby waits so long")
    worker_lease_seconds: float = Field(6, gt=0, description="a silent worker is lost after it")
    device_lease_seconds: float = Field(
        30, gt=0, description="a GPU whose owner has not renewed for so long may be claimed"
    )
    web_address: str = Field("", description="host:port of the web page; default: there is none")
    web_token_file: Path | None = Field(
        None, description="the token that readers of the web page must know, 16 characters or more"
    )
    worker_wait_seconds: float = Field(
        600, gt=0, description="a run fails when a kind of worker is missing for so long"
    )
