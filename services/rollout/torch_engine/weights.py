"""Reads a Hugging Face directory of safetensors whole, and checks it, before anything changes.

`read_weights` returns every tensor that the architecture needs, on the CPU, under its Hugging
Face name, with an adapter (LoRA) merged in where the directory has one. A directory that is
incomplete, of another shape or not finite raises here, while the old weights still serve; nothing
after this step is expected to fail.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rollpacker.refit.adapter import (
    ADAPTER_TENSORS,
    AdapterError,
    has_adapter,
    merged,
    read_scale,
)
from services.rollout.engine import InvalidRequestError, WeightsNotFoundError
from services.rollout.torch_engine.decoder_config import DecoderConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every weight of the architecture."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.layer_count):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                shapes[f"{prefix}{norm}.weight"] = (config.head_dim,)
    return shapes


def read_weights(directory: Path, config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Every weight by name, on the CPU, as stored.

    Raises WeightsNotFoundError (missing or damaged files, missing tensors), InvalidRequestError
    (shapes, unknown tensors or values that are not finite).
    """
    found: dict[str, torch.Tensor] = {}
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                    found[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsNotFoundError(f"{path} cannot be read: {error}") from error
    if has_adapter(directory):
        found = _with_adapter(directory, found)
    return _checked(directory, found, expected_shapes(config), config.tied_embeddings)


def _with_adapter(directory: Path, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    path = directory / ADAPTER_TENSORS
    try:
        return merged(base, load_file(path), read_scale(directory))
    except (OSError, SafetensorError) as error:
        raise WeightsNotFoundError(f"{path} cannot be read: {error}") from error
    except AdapterError as error:
        raise InvalidRequestError("weights_uri", f"{directory}: {error}") from error


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsNotFoundError(f"{index} cannot be read: {error!r}") from error
        if any(Path(name).name != name for name in names):
            raise WeightsNotFoundError(f"{index} names a file outside its directory")
        files = [directory / name for name in sorted(names)]
    else:
        files = [directory / _SINGLE]
    for path in files:
        if not path.is_file():
            raise WeightsNotFoundError(f"{path} does not exist: no complete weights there")
    return files


def _checked(
    directory: Path,
    found: dict[str, torch.Tensor],
    shapes: dict[str, tuple[int, ...]],
    tied: bool,
) -> dict[str, torch.Tensor]:
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise WeightsNotFoundError(
            f"{directory} lacks {len(missing)} of {len(shapes)} tensors, first {missing[0]}"
        )
    for name in sorted(found.keys() - shapes.keys()):
        if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
            raise InvalidRequestError(
                "weights_uri", f"{directory} holds {name}, which its config.json does not explain"
            )
    for name, shape in shapes.items():
        tensor = found[name]
        if tuple(tensor.shape) != shape:
            raise InvalidRequestError(
                "weights_uri",
                f"{directory}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidRequestError(
                "weights_uri", f"{directory}: {name} holds values that are not finite"
            )
    return {name: found[name] for name in shapes}
