"""The loss: pure functions of tensors, summed over tokens and divided by nothing.

A step's loss is one sum over all its trained tokens, divided once at the end by a normaliser that
does not depend on which groups share a step or a micro-batch. So nothing here averages, except
over the tokens of one response. With r = exp(log p - log p_old) and A the advantage, each token
adds

    selection_weight * share
        * (correction * surrogate(r, A) + kl_coefficient * kl - entropy_coefficient * entropy)

where selection_weight is that of its group, and share is 1, or with the normaliser `response_mean`
1 / (trained tokens of its response).

Shapes: B responses, padded to K positions; all tensors are [B, K], the mask is boolean, and only
`logprobs` (and `entropies`) have a gradient. A position outside the mask adds exactly 0 to every
sum and has a gradient of exactly 0, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollpacker.algorithms import Surrogate


@dataclass(frozen=True, slots=True)
class Clip:
    """The ratio is clipped to [1 - low, 1 + high]."""

    low: float
    high: float

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


class TokenLosses(NamedTuple):
    """A surrogate, negated, per token; both [B, K]."""

    losses: Tensor  # with gradient
    clipped: Tensor  # bool: trained tokens whose ratio was held back


SurrogateFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLosses]


def clipped_token(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLosses:
    """PPO's clipped surrogate, token by token: min(r A, clip(r) A)."""
    return _pessimistic(_log_ratio(logprobs, old_logprobs, mask), advantages, mask, clip)


def clipped_response(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLosses:
    """The same with one ratio per response, the product over its tokens (RLOO).

    Each of its tokens gets the response's loss; averaged over the tokens it is that loss again.
    """
    product = _log_ratio(logprobs, old_logprobs, mask).sum(-1, keepdim=True)
    return _pessimistic(product.expand_as(mask), advantages, mask, clip)


def clipped_geometric(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLosses:
    """The same with the geometric mean of a response's ratios (GSPO)."""
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    mean = log_ratio.sum(-1, keepdim=True) / _token_counts(mask)
    return _pessimistic(mean.expand_as(mask), advantages, mask, clip)


def clipped_weight(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: Clip
) -> TokenLosses:
    """CISPO: clip(r) A log p, where clip(r) has no gradient. No token loses its gradient."""
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, mask)).detach()
    bounded = clip(ratio)
    losses = torch.where(mask, -bounded * advantages * logprobs, 0.0)
    return TokenLosses(losses, mask & (bounded != ratio))


SURROGATES: Mapping[Surrogate, SurrogateFunction] = {
    Surrogate.CLIPPED: clipped_token,
    Surrogate.WHOLE_RESPONSE: clipped_response,
    Surrogate.GEOMETRIC_MEAN: clipped_geometric,
    Surrogate.WEIGHT: clipped_weight,
}


def divergence(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: str
) -> Tensor:
    """Estimate of KL(policy || reference) per token, from the sampled token alone, in nats.

    With d = reference - policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. As a loss, the
    gradient of k2 is in expectation that of the divergence; k3's is so near d = 0; k1's is 0.
    """
    d = torch.where(mask, reference_logprobs - logprobs, 0.0)
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(d) - d
    raise ValueError(f"kl_estimator {estimator!r} is not one of k1, k2, k3")


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, mode: str, cap: float
) -> Tensor:
    """Importance weights from the engine's law to the trainer's, without gradient.

    w = exp(old - rollout). `truncated`: min(w, cap); `masked`: w up to the cap, above it 0;
    `none`: 1.
    """
    if mode == "none":
        return torch.ones_like(old_logprobs)
    weights = torch.exp(_log_ratio(old_logprobs, rollout_logprobs, mask)).detach()
    if mode == "truncated":
        return weights.clamp(max=cap)
    return torch.where(weights <= cap, weights, 0.0)


def per_response(losses: Tensor, mask: Tensor) -> Tensor:
    """Each token's loss over its response's trained tokens: the sum becomes the mean."""
    return losses / _token_counts(mask)


class Mismatch(NamedTuple):
    """How far the trainer's logprobs are from the engine's."""

    kl_sum: Tensor  # scalar: sum over the mask of the k3 estimate of KL(engine || trainer)
    ratio_max: Tensor  # scalar: largest factor between the two probabilities, at least 1


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mismatch:
    """Compares the trainer's old logprobs with the engine's. No gradient.

    k3 = exp(d) - 1 - d with d = old - rollout: never negative, and 0 where the two agree.
    """
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0)
    kl_sum = (torch.expm1(difference) - difference).sum()
    return Mismatch(kl_sum, torch.exp(difference.abs().amax()))


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - old_logprobs, 0.0)


def _token_counts(mask: Tensor) -> Tensor:
    """Trained tokens per response, [B, 1], at least 1."""
    return mask.sum(-1, keepdim=True).clamp(min=1)


def _pessimistic(log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLosses:
    ratio = torch.exp(log_ratio)
    plain, clipped = ratio * advantages, clip(ratio) * advantages
    losses = torch.where(mask, -torch.minimum(plain, clipped), 0.0)
    return TokenLosses(losses, mask & (clipped < plain))
