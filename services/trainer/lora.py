"""LoRA (arXiv 2106.09685, by peft): small matrices beside the linear layers are trained.

Each linear layer but the head computes W x + scale * B A x; W is frozen, B begins as zero, so the
first policy is the initial model. The layers are changed in place, so that the model keeps its
names and its config; in a state dict a layer `x` has `x.base_layer.weight`,
`x.lora_A.default.weight` and `x.lora_B.default.weight`, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollpacker.refit.adapter import PREFIX, add_product
from services.trainer.model_loading import ModelNotFoundError, in_dtype

_BASE = ".base_layer."
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Lora:
    """Size and strength of an adapter."""

    rank: int
    alpha: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def peft_config(self, tensors: Iterable[str]) -> dict[str, Any]:
        """adapter_config.json of an adapter with tensors of these names."""
        layers = {name.partition(".lora_")[0] for name in tensors}
        return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank} | {
            "lora_alpha": self.alpha,
            "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
            "bias": "none",
            "base_model_name_or_path": None,
        }


def add_adapter(module: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze a transformers model and put the trained matrices beside its linear layers.

    They begin the same on every rank and in every process, in `dtype`. Raises ModelNotFoundError
    where there are none, or where peft would change experts as well.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and few runs need it

    layers = _linear_layers(module)
    if not layers:
        raise _no_adapter(lora, "no linear layer")
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=layers, task_type="CAUSAL_LM"
    )
    module.requires_grad_(False)
    with in_dtype(module, dtype), torch.random.fork_rng():  # peft takes over that of the layer
        torch.manual_seed(0)
        inject_adapter_in_model(config, module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if others := {name.partition(".lora_")[0] for name in trained} ^ set(layers):
        raise _no_adapter(lora, f"other layers than the linear ones: {min(others)}")


def _no_adapter(lora: Lora, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"trainer.lora_rank: {lora.rank}: the model has {why}; set it to 0, or take another model"
    )


def _linear_layers(module: nn.Module) -> list[str]:
    """Names of every linear layer but the head. Experts that share one tensor are not among them,
    as they are for peft's "all-linear"."""
    head = cast(Any, module).get_output_embeddings()
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return sorted(name for name, part in linear.items() if part is not head)


def merged(tensors: Iterable[Named], lora: Lora) -> Iterator[Named]:
    """The whole tensors of the changed model as those of a plain one, adapter added."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(f"{_BASE}weight") or name.endswith(_DOWN):
            held[name] = tensor
        elif name.endswith(_UP):
            stem = name.removesuffix(_UP)
            weight, down = held.pop(f"{stem}{_BASE}weight"), held.pop(stem + _DOWN)
            yield f"{stem}.weight", add_product(weight, down, tensor, lora.scale)
        else:
            yield name.replace(_BASE, "."), tensor


def base_only(tensors: Iterable[Named]) -> Iterator[Named]:
    """The frozen tensors, named as in a plain model."""
    for name, tensor in tensors:
        if not name.endswith((_DOWN, _UP)):
            yield name.replace(_BASE, "."), tensor


def adapter_only(tensors: Iterable[Named]) -> Iterator[Named]:
    """The trained tensors, named as in peft's files."""
    for name, tensor in tensors:
        if name.endswith((_DOWN, _UP)):
            yield PREFIX + name.replace(".default.", "."), tensor
