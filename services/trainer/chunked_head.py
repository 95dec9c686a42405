"""The last layer of a model whose logits would not fit: logprobs without the logits.

For a long response the logits [N, V] are the largest tensor of all (32k tokens of a 150k
vocabulary: 20 GB in float32). Here they exist a chunk of positions at a time: once in the forward
pass, and again in the backward pass, which makes them anew from the hidden states. So memory holds
[N, H] and one chunk, for one more product of the last layer.

The model's own head is replaced for the time of one call, so that everything around it (FSDP's
hooks, autocast, tied weights) is as it always is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.trainer.logprobs import chunk_statistics, logit_slopes, slices


class _HeadLogprobs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], ids [N] -> logprobs [N], entropies [N]; see `logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(hidden)
        rows, columns = hidden.to(dtype), weight.to(dtype)
        parts = [
            chunk_statistics(rows[part] @ columns.T, token_ids[part], temperature)
            for part in slices(len(rows), len(columns))
        ]
        logprobs, entropies, normalisers = (torch.cat(c) for c in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, token_ids, normalisers, entropies)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, token_ids, normalisers, entropies = ctx.saved_tensors
        rows, columns = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight, dtype=torch.promote_types(ctx.dtype, torch.float32))
        for part in slices(len(rows), len(columns)):
            slope = logit_slopes(
                rows[part] @ columns.T,
                token_ids[part],
                normalisers[part],
                entropies[part],
                by_logprob[part] if by_logprob is not None else None,
                by_entropy[part] if by_entropy is not None else None,
                ctx.temperature,
            ).to(ctx.dtype)
            by_hidden[part] = slope @ columns
            by_weight += slope.T @ rows[part]
        return by_hidden, by_weight.to(weight.dtype), None, None


def can_replace_head(module: nn.Module) -> bool:
    """Whether a transformers model ends in a plain product: no bias, no function of the logits."""
    head = getattr(module, "lm_head", None)
    config = cast(Any, module).config
    changed = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_scale")
    return (
        isinstance(head, nn.Linear)
        and head.bias is None
        and not any(getattr(config, name, None) for name in changed)
    )


@contextlib.contextmanager
def head_replaced(module: nn.Module, target_ids: Tensor, temperature: float) -> Iterator[None]:
    """Within, the model's logits [B, K, V] are [B, K, 2]: logprob of the target, and entropy."""
    head = cast(nn.Linear, module.lm_head)

    def forward(hidden: Tensor) -> Tensor:
        logprobs, entropies = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), head.weight, target_ids.flatten(), temperature
        )
        return torch.stack((logprobs, entropies), -1).view(*target_ids.shape, 2)

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
