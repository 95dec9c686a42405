"""What the files of a model directory say, without loading a tensor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.settings import SettingsError

_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a model directory say."""

    architecture: str
    parameters: int  # numbers stored in the safetensors files
    context_tokens: int | None  # longest sequence it was made for; None: not said
    vocabulary_size: int | None  # token ids that it knows; None: not said


def inspect_model(directory: Path) -> ModelFacts:
    """Read config.json and the headers of *.safetensors. Raises SettingsError."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        files = sorted(directory.glob("*.safetensors"))
        parameters = sum(_count_parameters(path) for path in files)
    except (OSError, ValueError) as error:
        raise SettingsError([("model", f"{directory} cannot be read: {error}")]) from error
    if not files:
        raise SettingsError([("model", f"{directory} holds no *.safetensors file")])
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelFacts(
        str(names[0]), parameters, config.get("max_position_embeddings"), config.get("vocab_size")
    )


def _count_parameters(path: Path) -> int:
    """Raises OSError, ValueError when the file is no whole safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
        size = file.seek(0, 2)
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{path.name} has {size} bytes, its header says {8 + length + end}")
    return sum(math.prod(tensor["shape"]) for tensor in header.values())
