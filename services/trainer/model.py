"""The model: loaded from a directory, sharded over the ranks, and read back whole.

One process holds plain parameters; several hold FSDP2 shards of the same ones. Either way the
gradients are sums over all ranks' tokens, never means. Master weights are float32 (float64 when
the run asks for it); with `bfloat16` the forward and backward passes compute in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.chunked_head import can_replace_head, head_replaced
from services.trainer.logprobs import token_logprobs
from services.trainer.lora import Lora, adapter_only, add_adapter, base_only, merged
from services.trainer.model_loading import MappedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


_WHOLE_LOGITS = 1 << 26  # logits of a micro-batch that may exist at once: 256 MiB in float32


class PolicyModel:
    """The policy that is trained. `module` is the transformers model."""

    def __init__(
        self,
        directory: Path,
        dtype: str,
        device: torch.device,
        mesh: DeviceMesh | None,
        *,
        activation_checkpointing: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """Load from a directory of safetensors; `lora`: train an adapter, not the weights.

        Raises ModelNotFoundError.
        """
        self.device = device
        self.compute_dtype = _DTYPES[dtype]
        master = torch.float64 if dtype == "float64" else torch.float32
        mapped = MappedModel(directory, master)
        self.module = mapped.module
        self.lora = lora
        if lora is not None:
            add_adapter(self.module, lora, master)
        if activation_checkpointing:
            _compute_layers_again(self.module)
        self._can_replace_head = can_replace_head(self.module)
        self.vocabulary_size = int(cast(Any, self.module).config.vocab_size)
        self._sharded = mesh is not None
        if mesh is not None:
            _shard(self.module, mesh, self.compute_dtype)
        mapped.to_master(device if mesh is None else None)

    def logprobs(
        self, input_ids: Tensor, target_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [B, K] of the targets; input_ids [B, L] end one token earlier.

        Padding stands on the right: a causal model never looks at it from a real token, so no
        attention mask is needed.
        """
        if self._can_replace_head and target_ids.numel() * self.vocabulary_size > _WHOLE_LOGITS:
            with head_replaced(self.module, target_ids, temperature):
                logprobs, entropies = self._logits(input_ids, target_ids.shape[1]).unbind(-1)
            return logprobs, entropies
        logits = self._logits(input_ids, target_ids.shape[1])
        logprobs, entropies = token_logprobs(
            logits.flatten(0, 1), target_ids.flatten(), temperature
        )
        return logprobs.view_as(target_ids), entropies.view_as(target_ids)

    def _logits(self, input_ids: Tensor, keep: int) -> Tensor:
        """Logits of the last `keep` positions."""
        with self._precision():
            output = self.module(input_ids=input_ids, use_cache=False, logits_to_keep=keep)
        return cast(Tensor, output.logits)

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, each once, in a fixed order."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every weight in the compute dtype, on the CPU, tied ones once.

        An adapter is merged into the weights. Collective: all ranks iterate to the end.
        """
        tensors = self._tensors() if self.lora is None else merged(self._tensors(), self.lora)
        return self._in_compute_dtype(tensors)

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same without the adapter: what was loaded. Collective."""
        return self._in_compute_dtype(base_only(self._tensors()))

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter alone, named as in peft's files, as it is trained. Collective."""
        return adapter_only(self._tensors(trained_only=True))

    def as_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of the model named and cut as in the files of a checkpoint.

        transformers keeps the experts of a layer in one tensor; files, and the engines that read
        them, have a tensor for each.
        """
        return dict(revert_weight_conversion(cast(PreTrainedModel, self.module), tensors))

    def _in_compute_dtype(
        self, tensors: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

    def _tensors(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the state dict, on the CPU, tied ones once. Collective."""
        seen: set[int] = set()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if id(tensor) in seen or (trained_only and not tensor.requires_grad):
                continue
            seen.add(id(tensor))
            value = tensor.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield name, whole.cpu().contiguous()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """FSDP casts by its own policy; one process needs autocast for bfloat16."""
        if self._sharded or self.compute_dtype != torch.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def _compute_layers_again(module: nn.Module) -> None:
    """Checkpoint the activations of each layer.

    transformers does so in layers that are in training mode; only the layers themselves are put
    into it, not what is inside them, so dropout stays off.
    """
    cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False})
    for part in module.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.training = True


def _shard(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 over each block that must stay whole (a decoder layer) and the rest, with sums.

    gloo has no pre-multiplied sum, so the division is switched off by forcing plain sums; that
    must be said to every FSDP module, not to the root alone.

    The parameters are still in their files: FSDP moves each block to the device and keeps a shard
    of it before it takes the next one, so neither host nor device ever holds the whole model.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = set(getattr(module, "_no_split_modules", None) or ())
    for part in list(module.modules()):
        if type(part).__name__ in blocks:
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
