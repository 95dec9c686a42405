"""Every number of the models, with its unit and its source, from `parameters.json`.

A parameter with `fitted_to` was fitted to that figure of the paper by `calibrate`; the others come
from data sheets, from the paper's text or are named assumptions. `ModelFacts` are the published
shapes of the three models; nothing in them is fitted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number."""

    name: str
    value: float
    unit: str
    source: str
    fitted_to: str | None = None


class Parameters(Mapping[str, float]):
    """Values by name; immutable."""

    def __init__(self, entries: tuple[Parameter, ...]) -> None:
        self.entries = entries
        self._values = {entry.name: entry.value for entry in entries}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def fitted(self) -> tuple[Parameter, ...]:
        """Those that were fitted to the paper."""
        return tuple(entry for entry in self.entries if entry.fitted_to is not None)

    def replace(self, values: Mapping[str, float]) -> Parameters:
        """The same with other values. Raises KeyError for an unknown name."""
        unknown = values.keys() - self._values.keys()
        if unknown:
            raise KeyError(f"no such parameter: {sorted(unknown)}; known: {sorted(self._values)}")
        return Parameters(
            tuple(
                dataclasses.replace(entry, value=float(values.get(entry.name, entry.value)))
                for entry in self.entries
            )
        )

    def to_json(self) -> str:
        """As `parameters.json` has it."""
        return json.dumps([dataclasses.asdict(entry) for entry in self.entries], indent=1) + "\n"


def load_parameters(path: Path | None = None) -> Parameters:
    """The parameters of the package, or of a file with the same form."""
    source = path or resources.files(__package__) / "parameters.json"
    rows = json.loads(source.read_text(encoding="utf-8"))
    return Parameters(tuple(Parameter(**row) for row in rows))


def paper_figures() -> dict[str, Any]:
    """The values that the paper prints or draws; `source` in it names the paper."""
    text = (resources.files(__package__) / "paper_figures.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Published shape of a model (Qwen2.5) and the paper's placement of it."""

    name: str
    parameters: float
    layers: int
    kv_bytes_per_token: int  # of all layers, bfloat16
    tensor_parallel_size: int
    gpus: int
    max_response_tokens: int

    @property
    def weight_bytes(self) -> float:
        """In bfloat16."""
        return 2 * self.parameters

    @property
    def weight_kv_tokens(self) -> int:
        """So many tokens of KV are as many bytes."""
        return round(self.weight_bytes / self.kv_bytes_per_token)


MODELS = {
    "7B": ModelFacts("7B", 7.6e9, 28, 57_344, 1, 16, 8192),
    "14B": ModelFacts("14B", 14.8e9, 48, 196_608, 2, 32, 16384),
    "32B": ModelFacts("32B", 32.8e9, 64, 262_144, 2, 64, 32768),
}
