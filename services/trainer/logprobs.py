"""Log-probabilities and entropies of sampled tokens, a chunk of the vocabulary's rows at a time.

N is the number of token positions, padding included; V the vocabulary. Besides the logits [N, V]
as they came, only tensors [N] live between the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # logits that are upcast at a time: 64 MiB in float32


class _TokenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature) at the sampled tokens, and entropies, chunk by chunk.

    With p the softmax and H the entropy of a position, the gradients by the scaled logits are
    onehot - p and -p (log p + H). Saves one logsumexp and one entropy per position; the backward
    pass upcasts the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        parts = [
            chunk_statistics(logits[part], token_ids[part], temperature)
            for part in slices(*logits.shape)
        ]
        logprobs, entropies, normalisers = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        ctx.save_for_backward(logits, token_ids, normalisers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor, None, None]:
        logits, token_ids, normalisers, entropies = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in slices(*logits.shape):
            result[part] = logit_slopes(
                logits[part],
                token_ids[part],
                normalisers[part],
                entropies[part],
                by_logprob[part] if by_logprob is not None else None,
                by_entropy[part] if by_entropy is not None else None,
                ctx.temperature,
            )
        return result, None, None


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and entropy of the distribution it was drawn from.

    logits [N, V] in any floating type; token_ids [N]. Returns two tensors [N] in nats, float32 or
    better.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, token_ids, temperature
    )
    return result


def chunk_statistics(
    logits: Tensor, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and logsumexps [n] of logits [n, V]; upcasts all of them."""
    scaled = _scaled(logits, temperature)
    normaliser = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(-1, _column(token_ids)).squeeze(-1) - normaliser
    shares = torch.exp(scaled - _column(normaliser))
    entropies = normaliser - (shares * scaled).sum(-1)
    return logprobs, entropies, normaliser


def logit_slopes(
    logits: Tensor,
    token_ids: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient by the logits [n, V], from those by logprobs and entropies [n]; None is 0."""
    if by_logprob is None:
        by_logprob = torch.zeros_like(normalisers)
    all_logprobs = _scaled(logits, temperature) - _column(normalisers)
    slope = -_column(by_logprob).expand_as(all_logprobs)
    if by_entropy is not None:
        slope = slope - _column(by_entropy) * (all_logprobs + _column(entropies))
    slope = all_logprobs.exp_().mul_(slope)
    slope.scatter_add_(-1, _column(token_ids), _column(by_logprob))
    return slope.div_(temperature)


def slices(positions: int, vocabulary: int) -> Iterator[slice]:
    """Chunks of positions whose logits hold _CHUNK_ELEMENTS at most, and one position at least."""
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    for start in range(0, positions, rows):
        yield slice(start, start + rows)


def _scaled(rows: Tensor, temperature: float) -> Tensor:
    """A fresh copy of the logits, divided by the temperature, in float32 or better."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)) / temperature


def _column(values: Tensor) -> Tensor:
    return values.unsqueeze(-1)
