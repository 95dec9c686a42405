"""The `tracking` section of a run's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollpacker.section import Section


class TrackingSettings(Section):
    """Experiment trackers besides metrics.jsonl and TensorBoard, which are always written."""

    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field(
        (), description="any of wandb, mlflow; they need the extra `trackers`"
    )
    project: str = Field(
        "rollpacker", min_length=1, description="project of wandb, experiment of mlflow"
    )
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline: below the run's directory, for `wandb sync`"
    )
    mlflow_uri: str = Field("", description="default: what MLFLOW_TRACKING_URI says")
