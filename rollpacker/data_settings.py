"""Where prompts come from: the sections `data` and `validation.sets` of the run settings.

A *source* is a place with rows and the format that says which columns they have. A run names one
(`data.path`) or several (`data.sources`); held-out sets are sources too. docs/data.md has the
formats.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollpacker.section import Section

RowFormat = Literal[
    "rollpacker", "verl", "slime", "openrlhf", "roll", "gsm8k", "math", "trl", "reasoning_gym"
]
GraderName = Literal["math", "code", "judge", "reasoning_gym", "custom"]
HELD_OUT = "held_out"  # the set of data.validation_path
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class RowSettings(Section):
    """How rows are read."""

    format: RowFormat = Field("rollpacker", description="which columns a row has; see docs/data.md")
    split: str = Field("", description="of a saved Hugging Face data set that has several")
    prompt_key: str = Field("", description="column of the prompt (a.b: b in a); default: format's")
    answer_key: str = Field("", description="column of the answer; default: format's")
    prompt_id_key: str = Field("", description="column of the prompt id; default: format's")
    options: dict[str, Any] = Field(
        {}, description="for format reasoning_gym: `size`, `seed`, and what its data set takes"
    )


class DataSource(RowSettings):
    """One source of a mix, or one held-out set."""

    name: str = Field("", description="names the domain, or the held-out set: A-Z a-z 0-9 . _ -")
    path: str = Field(description="as data.path")
    grader: GraderName | None = Field(None, description="default: reward.grader")
    weight: float | None = Field(
        None, gt=0, description="share of the prompts; for all or for none"
    )


class DataSettings(RowSettings):
    """Where prompts come from."""

    path: str = Field(
        "",
        description="JSONL or parquet file, directory of a saved Hugging Face data set, or the name"
        " of a reasoning-gym data set; or leave it out and give `sources`",
    )
    sources: tuple[DataSource, ...] = Field((), description="a mix: a list of sources, each named")
    validation_path: str | None = Field(
        None, description="held-out rows in the same format; more sets: validation.sets"
    )
    tokenizer: str = Field("", description="directory with tokenizer.json; default: the model's")
    epochs: int = Field(1, ge=1, description="passes over the data")
    shuffle: bool = Field(True, description="a new seeded order in every epoch")
    apply_chat_template: bool = Field(False, description="render `prompt` by the chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="what the template gets besides the messages: {enable_thinking: false}"
    )
    max_prompt_tokens: int = Field(4096, ge=1, description="longer prompts are over-long")
    overlong_prompts: Literal["refuse", "skip"] = Field(
        "refuse", description="an over-long prompt fails the run, or is left out and counted"
    )

    @model_validator(mode="after")
    def _names_its_sources(self) -> Self:
        if bool(self.path) == bool(self.sources):
            given = "both are given" if self.path else "neither is given"
            raise ValueError(f"path: {given}, path and sources; give one of them")
        if self.sources:
            check_names("sources", [source.name for source in self.sources])
            misplaced = [
                name
                for name, field in RowSettings.model_fields.items()
                if getattr(self, name) != field.default and not self.validation_path
            ]
            if misplaced:
                raise ValueError(
                    f"{misplaced[0]}: stands beside sources; give it to each source instead"
                )
            if len({source.weight is None for source in self.sources}) > 1:
                without = next(s.name for s in self.sources if s.weight is None)
                raise ValueError(
                    f"sources: {without} has no weight and others have; give all of them one,"
                    " or none (then every prompt comes once per epoch)"
                )
        return self

    @property
    def resolved_sources(self) -> tuple[DataSource, ...]:
        """`sources`, or the one that `path` makes, which has no name."""
        return self.sources or (self._own_source("", self.path),)

    @property
    def held_out(self) -> DataSource | None:
        """The held-out set that `validation_path` makes."""
        return self._own_source(HELD_OUT, self.validation_path) if self.validation_path else None

    def _own_source(self, name: str, path: str) -> DataSource:
        own = {field: getattr(self, field) for field in RowSettings.model_fields}
        return DataSource(name=name, path=path, **own)


def check_names(setting: str, names: list[str]) -> None:
    """Raises ValueError unless each source has a name of its own, fit for files and metrics."""
    for index, name in enumerate(names):
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"{setting}: name {name!r} of number {index + 1} is not 1 to 64 of A-Z, a-z, 0-9,"
                " dot, _ and -, starting with a letter or digit; name it so"
            )
        if name in names[:index]:
            raise ValueError(f"{setting}: {name} stands twice; give each its own name")
