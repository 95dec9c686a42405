"""The shape of a decoder: what its config.json says, and how many numbers that makes.

The families that engines and trainer are tested with. Anything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.settings import SettingsError

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_WITH_EXPERTS = ("mixtral", "qwen3_moe")
_QWEN3_HEAD_DIM = 128  # where its config.json says nothing
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide about memory."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward part, or of one expert
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int  # longest sequence that it was made for
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    experts: int = 0  # in each layer; 0: a dense model
    experts_per_token: int = 0

    @property
    def query_size(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of the keys of one layer; the values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        hidden, query, kv = self.hidden_size, self.query_size, self.kv_size
        attention = 2 * hidden * query + 2 * hidden * kv
        feed_forward = max(1, self.experts) * 3 * hidden * self.intermediate_size
        router = self.experts * hidden
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = (query + 2 * kv if self.qkv_bias else 0) + (hidden if self.output_bias else 0)
        biases += 2 * self.intermediate_size + hidden if self.mlp_bias else 0
        return attention + feed_forward + router + norms + biases

    @property
    def root_parameters(self) -> int:
        """Outside the layers: embedding, head, last norm."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def weight_kv_tokens(self) -> int:
        """Tokens whose keys and values are as many numbers as the weights that a decode step reads.

        All but the table of the input embedding, of which it reads a row for each response. With
        experts all of them: the responses of a batch choose nearly each of them.
        """
        table = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return round((self.parameters - table) / (2 * self.layers * self.kv_size))


def read_shape(directory: Path) -> ModelShape:
    """The shape of the model in a directory. Raises SettingsError."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError([("model", f"{path} cannot be read: {error}")]) from error
    if not isinstance(values, dict):
        raise SettingsError([("model", f"{path} is not a JSON object")])
    return parse_shape(values)


def weight_kv_tokens(directory: Path) -> int:
    """Of the model in a directory; 0 where its shape is not known."""
    try:
        return read_shape(directory).weight_kv_tokens
    except SettingsError:
        return 0


def parse_shape(values: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises SettingsError."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise _unsupported("model_type", family, f"one of {', '.join(FAMILIES)}")
    for key in _REQUIRED:
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise _unsupported(key, values.get(key), "a positive integer")
    if values.get("quantization_config"):
        wanted = "a model in plain floating point"
        raise _unsupported("quantization_config", values["quantization_config"], wanted)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise _unsupported("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    derived = _QWEN3_HEAD_DIM if family == "qwen3" else values["hidden_size"] // heads
    experts, chosen = _experts(values)
    biased = bool(values.get("attention_bias", False))
    return ModelShape(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values.get("moe_intermediate_size") or values["intermediate_size"],
        layers=values["num_hidden_layers"],
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=values.get("head_dim") or derived,
        context_tokens=values["max_position_embeddings"],
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or biased,
        output_bias=family != "qwen2" and biased,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        experts=experts,
        experts_per_token=chosen,
    )


def _experts(values: Mapping[str, Any]) -> tuple[int, int]:
    """How many a layer has, and how many of them a token takes; zeros for a dense model."""
    key = "num_local_experts" if values.get("num_local_experts") else "num_experts"
    count = values.get(key) or 0
    if values["model_type"] not in _WITH_EXPERTS:
        if count:
            raise _unsupported(key, count, "no experts in this family")
        return 0, 0
    for name, value in ((key, count), ("num_experts_per_tok", values.get("num_experts_per_tok"))):
        if not isinstance(value, int) or value < 1:
            raise _unsupported(name, value, "a positive integer")
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        name = "mlp_only_layers" if values.get("mlp_only_layers") else "decoder_sparse_step"
        raise _unsupported(name, values[name], "experts in every layer")
    return count, values["num_experts_per_tok"]


def _unsupported(key: str, value: object, wanted: str) -> SettingsError:
    return SettingsError([("model", f"config.json has {key}={value!r}; wanted: {wanted}")])
