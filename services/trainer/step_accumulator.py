"""Gradient sums of one step, un-normalised, in the order in which micro-batches are added.

States: *empty*, and *holding* sums of some micro-batches. `add` moves towards more, `drop` back to
empty. Nothing is divided here: a step's gradient is the sum over its trained tokens, and the one
division comes with the update. Weights never move here either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer import loss
from services.trainer.model import PolicyModel
from services.trainer.packing import MicroBatch
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings

_LOSS, _ENTROPY, _KL, _CLIPPED, _TOKENS, _BATCHES, _REAL, _PADDED = range(8)


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a step's micro-batches add up to, over all ranks."""

    loss: float  # un-normalised
    entropy: float  # nats, summed over trained tokens
    mismatch_kl: float  # summed over trained tokens
    mismatch_ratio_max: float  # at least 1
    clipped_tokens: int
    trained_tokens: int
    micro_batches: int  # dummies left out
    real_tokens: int  # prompts included
    padded_tokens: int  # real tokens and padding

    def per_token(self, value: float) -> float:
        """value divided by the trained tokens; 0 when there are none."""
        return value / self.trained_tokens if self.trained_tokens else 0.0


class StepAccumulator:
    """Adds micro-batches up; one per rank, all in lockstep."""

    def __init__(
        self, model: PolicyModel, settings: OpenRunSettings, temperature: float, ranks: Ranks
    ) -> None:
        self._model = model
        self._settings = settings
        self._temperature = temperature
        self._ranks = ranks
        self.drop()

    def drop(self) -> None:
        """Forget every sum."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._sums = torch.zeros(8, dtype=torch.float64, device=self._model.device)
        self._ratio_max = torch.ones((), dtype=torch.float64, device=self._model.device)

    def add(self, batch: MicroBatch) -> None:
        """One forward and backward pass. Collective when sharded."""
        device = self._model.device
        mask = batch.mask.to(device).flatten()
        target_ids = batch.target_ids.to(device)
        advantages = batch.advantages.to(device).unsqueeze(1).expand_as(target_ids).flatten()
        logits = self._model.logits(batch.input_ids.to(device), target_ids.shape[1])
        logprobs, entropies = loss.token_logprobs(
            logits.flatten(0, 1), target_ids.flatten(), self._temperature
        )
        # One update per step: the weights that train are the weights that sampled.
        old_logprobs = logprobs.detach()
        surrogate = loss.clipped_surrogate(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            clip_low=self._settings.clip_low,
            clip_high=self._settings.clip_high,
        )
        surrogate.loss.backward()  # type: ignore[no-untyped-call]
        rollout_logprobs = batch.rollout_logprobs.to(device).flatten()
        self._count(batch, mask, surrogate, entropies, old_logprobs, rollout_logprobs)

    def sums(self) -> StepSums:
        """Over all ranks. Collective."""
        totals = self._ranks.sum(self._sums.cpu()).tolist()
        ratio_max = self._ranks.max(self._ratio_max.cpu()).item()
        return StepSums(
            loss=totals[_LOSS],
            entropy=totals[_ENTROPY],
            mismatch_kl=totals[_KL],
            mismatch_ratio_max=ratio_max,
            clipped_tokens=round(totals[_CLIPPED]),
            trained_tokens=round(totals[_TOKENS]),
            micro_batches=round(totals[_BATCHES]),
            real_tokens=round(totals[_REAL]),
            padded_tokens=round(totals[_PADDED]),
        )

    def gradients(self) -> list[Tensor]:
        """The gradient sums, zeros where nothing was added; the parameters hold the same ones."""
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    @torch.no_grad()
    def _count(
        self,
        batch: MicroBatch,
        mask: Tensor,
        surrogate: loss.Surrogate,
        entropies: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
    ) -> None:
        mismatch = loss.mismatch(old_logprobs, rollout_logprobs, mask)
        counted = [
            surrogate.loss.detach(),
            torch.where(mask, entropies, 0.0).sum(),
            mismatch.kl_sum,
            surrogate.clipped_tokens,
            mask.sum(),
        ]
        self._sums[:_BATCHES] += torch.stack([value.double() for value in counted])
        self._sums[_BATCHES] += int(batch.token_count > 0)
        self._sums[_REAL] += batch.token_count
        self._sums[_PADDED] += batch.padded_token_count
        self._ratio_max = torch.maximum(self._ratio_max, mismatch.ratio_max.double())
