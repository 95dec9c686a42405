"""The loss: pure functions of tensors, summed over tokens and divided by nothing.

A step's loss is one sum over all its trained tokens, divided once at the end by a normaliser
that does not depend on how the groups were packed into micro-batches. So nothing here averages.
Shapes: N is the number of token positions of a micro-batch, padding included; V the vocabulary.
A position outside the mask adds exactly 0 to every sum and has a gradient of exactly 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # logits that are upcast at a time: 64 MiB in float32


class _TokenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the sampled tokens, chunk by chunk.

    Saves the logits as they came and one logsumexp per position; the backward pass upcasts again,
    a chunk at a time. So no second [N, V] tensor lives between the passes.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _chunk_statistics(rows, ids, temperature)
            for rows, ids in zip(_chunks(logits), _chunks(token_ids, logits), strict=True)
        ]
        logprobs, entropies, normalisers = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(logits, token_ids, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids, normalisers = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows, ids, normaliser, gradient, out in zip(
            _chunks(logits),
            _chunks(token_ids, logits),
            _chunks(normalisers, logits),
            _chunks(gradients[0], logits),
            _chunks(result),
            strict=True,
        ):
            scale = (gradient / ctx.temperature).unsqueeze(-1)
            share = torch.exp(_scaled(rows, ctx.temperature) - normaliser.unsqueeze(-1))
            share.mul_(-scale).scatter_add_(-1, ids.unsqueeze(-1), scale)
            out.copy_(share)
        return result, None, None


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution it was drawn from.

    logits [N, V] in any floating type; token_ids [N]. Returns two tensors [N] in nats, float32 or
    better; only the first one has a gradient.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, token_ids, temperature
    )
    return result


class Surrogate(NamedTuple):
    """What the clipped surrogate adds to the sums of its step."""

    loss: Tensor  # scalar, with gradient
    clipped_tokens: Tensor  # scalar: trained tokens whose ratio was held back


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """GRPO's loss: the sum over the mask of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r = exp(logprobs - old_logprobs). All tensors [N]; mask is boolean; only `logprobs` has a
    gradient.
    """
    ratio = torch.exp(torch.where(mask, logprobs - old_logprobs, 0.0))
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, clipped = ratio * advantages, bounded * advantages
    loss = torch.where(mask, -torch.minimum(plain, clipped), 0.0).sum()
    return Surrogate(loss, (mask & (clipped < plain)).sum())


class Mismatch(NamedTuple):
    """How far the trainer's logprobs are from the engine's."""

    kl_sum: Tensor  # scalar: sum over the mask of the k3 estimate of KL(engine || trainer)
    ratio_max: Tensor  # scalar: largest factor between the two probabilities, at least 1


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mismatch:
    """Compares the trainer's old logprobs with the engine's. All tensors [N], no gradient.

    k3 = exp(d) - 1 - d with d = old - rollout: never negative, and 0 where the two agree.
    """
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0)
    kl_sum = (torch.expm1(difference) - difference).sum()
    return Mismatch(kl_sum, torch.exp(difference.abs().amax()))


def _scaled(rows: Tensor, temperature: float) -> Tensor:
    """A fresh copy of the logits, divided by the temperature, in float32 or better."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)) / temperature


def _chunk_statistics(
    rows: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = _scaled(rows, temperature)
    normaliser = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normaliser
    shares = torch.exp(scaled - normaliser.unsqueeze(-1))
    entropies = normaliser - (shares * scaled).sum(-1)
    return logprobs, entropies, normaliser


def _chunks(tensor: Tensor, logits: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split along the positions so that a chunk of the logits holds _CHUNK_ELEMENTS at most."""
    vocabulary = (tensor if logits is None else logits).shape[-1]
    return torch.split(tensor, max(1, _CHUNK_ELEMENTS // vocabulary))
