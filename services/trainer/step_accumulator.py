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
from services.trainer.objective import Objective, TokenValues, objective
from services.trainer.packing import MicroBatch
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings

_TERMS = len(Objective._fields)
_BATCHES, _REAL, _PADDED = range(_TERMS, _TERMS + 3)


@dataclass(frozen=True, slots=True)
class StepSums:
    """What a step's micro-batches add up to, over all ranks."""

    loss: float  # un-normalised, by selection weights
    entropy: float  # nats, summed over trained tokens
    mismatch_kl: float  # summed over trained tokens
    clipped_tokens: int
    trained_tokens: int
    weighed_tokens: float  # trained tokens, each counted by its selection weight
    reference_kl: float  # summed over trained tokens
    correction: float  # weights summed over trained tokens
    squared_advantage: float  # summed over responses with a trained token
    rows: int  # how many those are
    micro_batches: int  # dummies left out
    real_tokens: int  # prompts included
    padded_tokens: int  # real tokens and padding
    mismatch_ratio_max: float  # at least 1

    def per_token(self, value: float) -> float:
        """value divided by the trained tokens; 0 when there are none."""
        return value / self.trained_tokens if self.trained_tokens else 0.0


class StepAccumulator:
    """Adds micro-batches up; one per rank, all in lockstep."""

    def __init__(
        self,
        model: PolicyModel,
        settings: OpenRunSettings,
        temperature: float,
        ranks: Ranks,
        reference: PolicyModel | None = None,
    ) -> None:
        """`reference` is the initial model; needed where the loss has a divergence from it."""
        self._model = model
        self._settings = settings
        self.temperature = temperature  # of the responses that `add` takes
        self._ranks = ranks
        self._reference = reference
        self.drop()

    def drop(self) -> None:
        """Forget every sum."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._sums = torch.zeros(_PADDED + 1, dtype=torch.float64, device=self._model.device)
        self._ratio_max = torch.ones((), dtype=torch.float64, device=self._model.device)

    def add(self, batch: MicroBatch) -> None:
        """One forward and backward pass. Collective when sharded."""
        batch = batch.to(self._model.device)
        logprobs, entropies = self._logprobs(self._model, batch)
        reference_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self._logprobs(self._reference, batch)
        values = TokenValues(
            logprobs=logprobs,
            entropies=entropies,
            rollout_logprobs=batch.rollout_logprobs,
            reference_logprobs=reference_logprobs,
            advantages=batch.advantages.unsqueeze(1).expand_as(batch.mask),
            selection_weights=batch.selection_weights.unsqueeze(1).expand_as(batch.mask),
            mask=batch.mask,
        )
        terms = objective(self._settings, values)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        self._count(batch, terms, logprobs.detach())

    def sums(self) -> StepSums:
        """Over all ranks. Collective."""
        totals = self._ranks.sum(self._sums.cpu()).tolist()
        named = dict(zip(Objective._fields, totals, strict=False))
        for name in ("clipped_tokens", "trained_tokens", "rows"):
            named[name] = round(named[name])
        return StepSums(
            **named,
            micro_batches=round(totals[_BATCHES]),
            real_tokens=round(totals[_REAL]),
            padded_tokens=round(totals[_PADDED]),
            mismatch_ratio_max=self._ranks.max(self._ratio_max.cpu()).item(),
        )

    def gradients(self) -> list[Tensor]:
        """The gradient sums, zeros where nothing was added; the parameters hold the same ones."""
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _logprobs(self, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the targets, both [B, K]."""
        return model.logprobs(batch.input_ids, batch.target_ids, self.temperature)

    @torch.no_grad()
    def _count(self, batch: MicroBatch, terms: Objective, logprobs: Tensor) -> None:
        self._sums[:_TERMS] += torch.stack([value.detach().double() for value in terms])
        self._sums[_BATCHES] += int(batch.token_count > 0)
        self._sums[_REAL] += batch.token_count
        self._sums[_PADDED] += batch.padded_token_count
        ratio_max = loss.mismatch(logprobs, batch.rollout_logprobs, batch.mask).ratio_max
        self._ratio_max = torch.maximum(self._ratio_max, ratio_max.double())
