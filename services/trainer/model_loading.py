"""The initial model from its files, so that a rank's host memory holds its shard and no more.

    mapped --(adapter added)--> sharded, or moved --> in the master dtype

*mapped*: the parameters are the bytes of the safetensors files in the dtype of the files, mapped
into memory: none is read until it is used, and ranks of a host share the pages; only experts are
read, because a layer's are put together into one tensor. *sharded*: FSDP copies the rows of its
rank; the map is let go (one rank on a CPU keeps it, where nothing has to be cast). Only then are
the numbers cast, which is exact, for a master dtype is at least as wide.

Files whose numbers have more than one floating dtype, or packed ones, are read and cast whole, by
every rank.

Buffers that are in no file are computed by the model in the dtype with which it is made (Gemma's
scale of embeddings is rounded to it): they are taken from a model without parameters that is made
in the master dtype.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# What files raise that are not as they should be, here and in transformers.
_UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)


class ModelNotFoundError(Exception):
    """There is no model in the directory that transformers can load; the message says why."""


class MappedModel:
    """A transformers model whose parameters are still in its files."""

    def __init__(self, directory: Path, master: torch.dtype) -> None:
        """Raises ModelNotFoundError."""
        if not (directory / "config.json").is_file():
            raise ModelNotFoundError(
                f"no config.json in {directory}; give a transformers directory"
            )
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._master = master
        try:
            self.module = _loaded(directory, _stored_dtype(directory) or master, master)
        except (*_UNREADABLE, SafetensorError) as error:
            raise ModelNotFoundError(f"{directory} cannot be loaded: {error}") from error

    def to_master(self, device: torch.device | None) -> None:
        """Cast what this rank has, on `device` (None: where it is)."""
        self.module.to(device=device, dtype=self._master)
        config = cast(Any, self.module).config
        config.dtype = self._master
        for path, value in _computed_buffers(config, self._master).items():
            owner, _, name = path.rpartition(".")
            module = self.module.get_submodule(owner)
            module.register_buffer(name, value.to(getattr(module, name).device), persistent=False)


@contextlib.contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile the parameters look as if they had this dtype; their numbers must not be used."""
    stored = {parameter: parameter.data for parameter in module.parameters()}
    for parameter, data in stored.items():
        parameter.data = data.new_empty((), dtype=dtype).expand(data.shape)  # takes no memory
    try:
        yield
    finally:
        for parameter, data in stored.items():
            parameter.data = data


def _loaded(directory: Path, dtype: torch.dtype, master: torch.dtype) -> nn.Module:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        output_loading_info=True,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
        # Grouped matrix products, the default, know no float64.
        experts_implementation="eager" if master == torch.float64 else None,
    )
    module, told = loaded
    # transformers would make up what is missing, other numbers on every rank.
    for what in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, told[what])):
            raise ValueError(
                f"its files and its config.json do not fit: {what.replace('_keys', '')} tensors"
                f" {', '.join(names[:3])} ({len(names)} in all)"
            )
    module.train(False)  # no dropout; gradients flow all the same
    return cast(nn.Module, module)


def _stored_dtype(directory: Path) -> torch.dtype | None:
    """That of all numbers in the files, if it is one that can be cast without loss."""
    single, index = directory / _SINGLE, directory / _INDEX
    names: set[str] = set()
    if single.is_file():
        names = {_SINGLE}
    elif index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    found: set[str] = set()
    for path in map(directory.joinpath, names):
        with safe_open(path, framework="pt") as file:
            found.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    return _STORED.get(found.pop()) if len(found) == 1 else None


def _computed_buffers(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name, those that are in no file."""

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
    finally:
        hook.remove()
    stored = module.state_dict().keys()
    return {name: tensor for name, tensor in module.named_buffers() if name not in stored}
