"""Tiny random models on disk, saved by transformers, for tests of engine and service."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 17
STOP = 3
PROMPT = (5, 6, 7, 8, 9)
CONTEXT = 32_768
FOREVER = 30_000  # tokens; a response of this length does not end while a test looks
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}  # of every engine
SGLANG_FAMILIES = {"mistral": MistralConfig, "mixtral": MixtralConfig, "qwen3_moe": Qwen3MoeConfig}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """Two small layers."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        **EXPERTS.get(family, {}),
        **changes,
    }
    return (FAMILIES | SGLANG_FAMILIES)[family](**values)


def save_model(directory: Path, family: str = "llama", *, seed: int = 0, **changes: object) -> Path:
    """A model whose weights are wide, so that its next-token laws are far from uniform."""
    values = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        **changes,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **values))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(directory)
    return directory
