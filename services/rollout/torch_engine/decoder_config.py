"""What the decoder needs of a Hugging Face config.json: Llama, Qwen2 and Qwen3.

Everything that would change the numbers and is not implemented is refused by name; nothing is
silently ignored. Both spellings of the rotary settings are read: `rope_parameters` (transformers
5) and `rope_theta` with `rope_scaling` (transformers 4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine import InvalidRequestError, WeightsNotFoundError

FAMILIES = ("llama", "qwen2", "qwen3")
_DEFAULT_THETA = 10_000.0
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear or llama3."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture; two directories with equal configs can swap weights in place."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_context: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_config(directory: Path) -> DecoderConfig:
    """Parse `directory`/config.json.

    Raises WeightsNotFoundError (no readable file), InvalidRequestError (not supported).
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightsNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WeightsNotFoundError(f"{path} is not a JSON object")
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The architecture that a config.json describes; InvalidRequestError if unsupported."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise _unsupported("model_type", family, f"one of {', '.join(FAMILIES)}")
    for key in _REQUIRED:
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise _unsupported(key, values.get(key), "a positive integer")
    _refuse_variants(values)
    attention_bias = bool(values.get("attention_bias", False))
    query_heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or query_heads
    if query_heads % kv_heads:
        raise _unsupported("num_key_value_heads", kv_heads, f"a divisor of {query_heads}")
    head_dim = values.get("head_dim") or values["hidden_size"] // query_heads
    if family == "qwen3" and values.get("head_dim") is None:
        head_dim = 128  # the default of that family
    if head_dim % 2:
        raise _unsupported("head_dim", head_dim, "an even number")
    return DecoderConfig(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        layer_count=values["num_hidden_layers"],
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
        max_context=values["max_position_embeddings"],
        rope=_read_rope(values),
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def _refuse_variants(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _unsupported("hidden_act", values["hidden_act"], "silu")
    if values.get("use_sliding_window"):
        raise _unsupported("use_sliding_window", True, "false")
    for kind in values.get("layer_types") or ():
        if kind != "full_attention":
            raise _unsupported("layer_types", kind, "full_attention in every layer")
    for key in ("quantization_config", "num_experts", "num_local_experts"):
        if values.get(key):
            raise _unsupported(key, values[key], "a dense model in plain floating point")


def _read_rope(values: Mapping[str, Any]) -> RopeConfig:
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise _unsupported("rope_parameters", given, "a mapping")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = float(given.get("rope_theta", values.get("rope_theta", _DEFAULT_THETA)))
    share = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise _unsupported("partial_rotary_factor", share, "1.0")
    try:
        if kind == "default":
            return RopeConfig("default", theta)
        if kind == "linear":
            return RopeConfig("linear", theta, float(given["factor"]))
        if kind == "llama3":
            return RopeConfig(
                "llama3",
                theta,
                float(given["factor"]),
                float(given["low_freq_factor"]),
                float(given["high_freq_factor"]),
                int(
                    given.get("original_max_position_embeddings")
                    or values["max_position_embeddings"]
                ),
            )
    except KeyError as error:
        raise _unsupported(f"rope_parameters.{error.args[0]}", None, "a number") from error
    raise _unsupported("rope_parameters.rope_type", kind, "default, linear or llama3")


def _unsupported(key: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        "weights_uri",
        f"config.json has {key}={value!r}; this engine serves {wanted}; SGLang serves more"
        " (ROLLPACKER_ROLLOUT_ENGINE=sglang)",
    )
