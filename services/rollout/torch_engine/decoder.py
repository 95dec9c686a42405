"""The decoder's forward pass, for Llama, Qwen2 and Qwen3, over a flat run of tokens.

The model holds weights and rotary tables, no state of responses. `forward` takes tokens with
their absolute positions and asks `attend` for each layer's attention: the prefill attends within
its own batch, a decode step attends to the KV cache. So both passes share every other operation.
Query, key and value projections are one matrix, and so are gate and up: fewer, larger products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.rollout.torch_engine.decoder_config import DecoderConfig, RopeConfig

# (layer, queries [n, query_heads, d], keys and values [n, 2, kv_heads, d]) -> [n, query_heads*d]
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [query_heads + kv_heads, head_dim]
    output: Tensor
    output_bias: Tensor | None
    inner_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """One model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`weights` as `read_weights` returns them; positions run from 0 to `context` - 1."""
        self.config = config
        self._cosine, self._sine = _rotary_tables(config, context, device, dtype)
        self._parts = {
            name: part.to(device, dtype, copy=True) for name, part in _fused(config, weights)
        }
        self._layers = [
            _Layer(**{name: self._parts.get(f"{index}.{name}") for name in _Layer.__slots__})  # type: ignore[arg-type]
            for index in range(config.layer_count)
        ]

    @property
    def weight_bytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self._parts.values())

    def swap(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite every weight in place; the shapes must be those of the config."""
        for name, part in _fused(self.config, weights):
            self._parts[name].copy_(part)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [n, hidden], final norm applied, of tokens [n] at positions [n]."""
        config, epsilon = self.config, self.config.norm_epsilon
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]
        rotated_heads = config.query_heads + config.kv_heads
        hidden = F.embedding(token_ids, self._parts["embedding"])
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.input_norm, epsilon)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(token_ids), -1, config.head_dim)
            rotated = qkv[:, :rotated_heads]
            heads = rotated
            if layer.qk_norm is not None:
                heads = F.rms_norm(heads, (config.head_dim,), None, epsilon) * layer.qk_norm
            torch.addcmul(heads * cosine, _swap_halves(heads), sine, out=rotated)
            kv = qkv[:, config.query_heads :]
            kv = kv.view(len(token_ids), 2, config.kv_heads, config.head_dim)
            mixed = attend(index, qkv[:, : config.query_heads], kv)
            hidden = hidden + F.linear(mixed, layer.output, layer.output_bias)
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.inner_norm, epsilon)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(hidden, (config.hidden_size,), self._parts["final_norm"], epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [n, vocab] of the next token, in float32 or float64."""
        head = self._parts.get("head", self._parts["embedding"])
        logits = F.linear(hidden, head)
        return logits if logits.dtype == torch.float64 else logits.float()


def _fused(config: DecoderConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as the forward pass wants them, one part at a time."""
    yield "embedding", weights["model.embed_tokens.weight"]
    yield "final_norm", weights["model.norm.weight"]
    if not config.tied_embeddings:
        yield "head", weights["lm_head.weight"]
    for index in range(config.layer_count):
        for name, part in _fused_layer(config, weights, f"model.layers.{index}.").items():
            yield f"{index}.{name}", part


def _fused_layer(
    config: DecoderConfig, weights: Mapping[str, Tensor], prefix: str
) -> dict[str, Tensor]:
    def joined(kind: str, *names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}.{kind}"] for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    parts = {
        "input_norm": joined("weight", "input_layernorm"),
        "qkv": joined("weight", *qkv),
        "output": joined("weight", "self_attn.o_proj"),
        "inner_norm": joined("weight", "post_attention_layernorm"),
        "gate_up": joined("weight", *gate_up),
        "down": joined("weight", "mlp.down_proj"),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = joined("bias", *qkv)
    if config.output_bias:
        parts["output_bias"] = joined("bias", "self_attn.o_proj")
    if config.mlp_bias:
        parts["gate_up_bias"] = joined("bias", *gate_up)
        parts["down_bias"] = joined("bias", "mlp.down_proj")
    if config.qk_norm:
        query = weights[f"{prefix}self_attn.q_norm.weight"].expand(config.query_heads, -1)
        key = weights[f"{prefix}self_attn.k_norm.weight"].expand(config.kv_heads, -1)
        parts["qk_norm"] = torch.cat([query, key])
    return parts


def _swap_halves(heads: Tensor) -> Tensor:
    """[..., d] with its two halves exchanged; the sine table carries the sign."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


def _rotary_tables(
    config: DecoderConfig, context: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [context, head_dim], computed in float32 as transformers does."""
    angles = torch.arange(context).float()[:, None] * _frequencies(config.rope, config.head_dim)
    cosine, sine = angles.cos(), angles.sin()
    tables = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Inverse frequencies [head_dim / 2]; llama3 slows the long wavelengths down by `factor`."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_context * plain / (2 * math.pi)  # over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
