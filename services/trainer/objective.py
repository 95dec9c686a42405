"""What one micro-batch adds to the sums of its step: the run's algorithm, put together.

The terms are pure functions of `loss`; here they get the run's settings. Nothing is divided by
anything that depends on another response.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollpacker.algorithms import ALGORITHMS
from services.trainer import loss
from services.trainer.settings import OpenRunSettings


class TokenValues(NamedTuple):
    """What is known of the tokens of a micro-batch; all [B, K]."""

    logprobs: Tensor  # under the weights that are trained, with gradient
    entropies: Tensor  # of the law that each token was drawn from, with gradient
    rollout_logprobs: Tensor
    reference_logprobs: Tensor | None  # under the initial model; None where no term needs them
    advantages: Tensor
    selection_weights: Tensor
    mask: Tensor  # bool: the trained tokens


class Objective(NamedTuple):
    """Scalars, each a sum over the micro-batch; only the loss has a gradient.

    Selection weights are in `loss` and `weighed_tokens` alone; the others describe the tokens.
    """

    loss: Tensor
    entropy: Tensor
    mismatch_kl: Tensor
    clipped_tokens: Tensor
    trained_tokens: Tensor
    weighed_tokens: Tensor  # trained tokens, each counted by its selection weight
    reference_kl: Tensor  # in the run's estimator
    correction: Tensor  # sum of the weights that correct for the engine's law
    squared_advantage: Tensor  # over responses that have a trained token
    rows: Tensor  # how many those are


def objective(settings: OpenRunSettings, values: TokenValues) -> Objective:
    """The un-normalised loss of the run's algorithm, and what is counted beside it."""
    mask, logprobs = values.mask, values.logprobs
    trainers_own = logprobs.detach()
    old_logprobs = values.rollout_logprobs if settings.old_logprobs == "rollout" else trainers_own
    surrogate = loss.SURROGATES[ALGORITHMS[settings.algorithm].surrogate](
        logprobs,
        old_logprobs,
        values.advantages,
        mask,
        loss.Clip(settings.clip_low, settings.clip_high),
    )
    correction = loss.correction_weights(
        trainers_own,
        values.rollout_logprobs,
        mask,
        settings.rollout_correction,
        settings.rollout_correction_cap,
    )
    token_losses = correction * surrogate.losses
    reference_kl = torch.zeros_like(logprobs)
    if values.reference_logprobs is not None:
        reference_kl = loss.divergence(
            logprobs, values.reference_logprobs, mask, settings.kl_estimator
        )
        token_losses = token_losses + settings.kl_coefficient * reference_kl
    entropies = torch.where(mask, values.entropies, 0.0)
    if settings.entropy_coefficient:
        token_losses = token_losses - settings.entropy_coefficient * entropies
    token_losses = values.selection_weights * token_losses
    if settings.resolved_normaliser == "response_mean":
        token_losses = loss.per_response(token_losses, mask)
    rows = mask.any(-1)
    return Objective(
        loss=token_losses.sum(),
        entropy=entropies.detach().sum(),
        mismatch_kl=loss.mismatch(trainers_own, values.rollout_logprobs, mask).kl_sum,
        clipped_tokens=surrogate.clipped.sum(),
        trained_tokens=mask.sum(),
        weighed_tokens=torch.where(mask, values.selection_weights, 0.0).sum(),
        reference_kl=reference_kl.detach().sum(),
        correction=torch.where(mask, correction, 0.0).sum(),
        squared_advantage=torch.where(rows, values.advantages[:, 0].square(), 0.0).sum(),
        rows=rows.sum(),
    )
