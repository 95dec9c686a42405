"""What every part of the run settings is made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run settings; refuses unknown keys and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
