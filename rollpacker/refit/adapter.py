"""A version of weights as frozen base weights and a low-rank adapter in peft's format (LoRA).

A directory has `model.safetensors` (the base), `adapter_model.safetensors` and
`adapter_config.json`. Who serves it adds scale * B A to each weight that the adapter names; who
cannot must refuse the directory (`has_adapter`), for the base alone is the untrained model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_TENSORS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
PREFIX: Final = "base_model.model."  # of tensor names, as peft writes them
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterError(ValueError):
    """This is no adapter of these weights; the message says why."""


def has_adapter(directory: Path) -> bool:
    """Whether the weights of a directory are more than its model.safetensors."""
    return (directory / ADAPTER_CONFIG).exists() or (directory / ADAPTER_TENSORS).exists()


def read_scale(directory: Path) -> float:
    """lora_alpha / r. Raises AdapterError."""
    path = directory / ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        scale = float(values["lora_alpha"]) / float(values["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise AdapterError(f"{path} is no configuration of an adapter: {error!r}") from error
    if values.get("peft_type") != "LORA" or values.get("use_dora") or values.get("use_rslora"):
        raise AdapterError(f"{path}: only plain LoRA is known")
    return scale


def merged(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """The base weights with the adapter added, each in the type of its base weight.

    Raises AdapterError for a tensor of the adapter that belongs to no base weight.
    """
    result = dict(base)
    for name, down in adapter.items():
        if not name.endswith(_DOWN):
            continue
        stem = name.removesuffix(_DOWN)
        target = f"{stem.removeprefix(PREFIX)}.weight"
        up = adapter.get(stem + _UP)
        if target not in base or up is None:
            raise AdapterError(f"{name} of the adapter belongs to no weight of the model")
        result[target] = add_product(base[target], down, up, scale)
    if 2 * sum(result[name] is not base[name] for name in base) != len(adapter):
        raise AdapterError("the adapter holds tensors that are no product of two matrices")
    return result


def add_product(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """weight + scale * up @ down, in float32 or better, returned in the type of the weight."""
    wide = weight.double() if weight.dtype == down.dtype and weight.itemsize > 4 else weight.float()
    return (wide + scale * (up.to(wide.dtype) @ down.to(wide.dtype))).to(weight.dtype)
