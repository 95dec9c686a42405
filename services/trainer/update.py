"""One optimizer update from a step's gradient sums: divide once, clip, step.

A gradient that is not finite changes nothing: weights and optimizer stay as they are, and the
caller is told. A step without a group moves nothing either, nor by momentum or weight decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.model import PolicyModel
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings
from services.trainer.step_accumulator import StepAccumulator, StepSums


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What an update did."""

    sums: StepSums
    normaliser: float  # what the sums were divided by
    grad_norm: float  # after the division, before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite; no weight has moved


def make_optimizer(model: PolicyModel, settings: OpenRunSettings) -> torch.optim.AdamW:
    """AdamW over all parameters, with a constant learning rate."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )


def apply_update(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    accumulator: StepAccumulator,
    settings: OpenRunSettings,
    ranks: Ranks,
) -> UpdateOutcome:
    """Apply the sums of all replicas and empty the accumulator. Collective."""
    sums = accumulator.sums()
    normaliser = settings.fixed_normaliser() or sums.weighed_tokens or 1.0
    gradients = accumulator.gradients()
    ranks.sum_over_replicas(gradients)
    for gradient in gradients:
        gradient.div_(normaliser)
    norm = _whole(torch.nn.utils.get_total_norm(gradients))
    skipped = not math.isfinite(norm.item())
    if not skipped and sums.micro_batches:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.max_grad_norm, norm)
        optimizer.step()
    accumulator.drop()
    return UpdateOutcome(sums, normaliser, norm.item(), optimizer.param_groups[0]["lr"], skipped)


def _whole(norm: Tensor) -> Tensor:
    """The norm over all ranks' shards."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
