"""Per-slot state of the running responses, as tensors, and the log of what they sample.

Nothing here loops over responses: a step gathers the rows of the active slots, samples, and
writes them back. Tokens and logprobs are logged per slot since the admission; the host keeps what
came before. The host learns which responses hit a stop token from one transfer per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker import sampling
from services.rollout.torch_engine.sampler import Sampler

# Columns of the integer table.
_TOKEN, _POSITION, _COUNT, _SEED_STATE, _NEAR_TIES = range(5)
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class SlotInput:
    """What a slot starts with."""

    slot: int
    last_token: int  # fed in the next step
    position: int  # absolute index of that token
    seed: int
    temperature: float
    stop_token_ids: frozenset[int]
    token_room: int  # tokens that may still be sampled


@dataclass(frozen=True, slots=True)
class SlotLog:
    """What a slot has sampled since its admission."""

    token_ids: list[int]
    logprobs: list[float]
    near_ties: int


class SlotTable:
    """State of `slot_count` slots on one device; `dtype` is that of the logits."""

    def __init__(
        self, slot_count: int, sampler: Sampler, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._sampler = sampler
        self._integers = torch.zeros((slot_count, 5), dtype=torch.int64, device=device)
        self._temperature = torch.ones((slot_count, 1), dtype=dtype, device=device)
        self._stops = torch.full((slot_count, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((slot_count, 0), dtype=torch.int32, device=device)
        self._logprobs = torch.zeros((slot_count, 0), dtype=dtype, device=device)

    def start(self, inputs: Sequence[SlotInput]) -> None:
        """Set these slots up; what they held before is gone."""
        slots = torch.tensor([each.slot for each in inputs], device=self._device)
        integers = [
            [each.last_token, each.position, 0, sampling.seed_state(each.seed), 0]
            for each in inputs
        ]
        self._integers[slots] = torch.tensor(integers, device=self._device)
        temperatures = [[each.temperature] for each in inputs]
        self._temperature[slots] = torch.tensor(
            temperatures, dtype=self._temperature.dtype, device=self._device
        )
        self._widen(
            max(each.token_room for each in inputs),
            max(len(each.stop_token_ids) for each in inputs),
        )
        width = self._stops.shape[1]
        stops = [[*each.stop_token_ids, *[_NO_TOKEN] * width][:width] for each in inputs]
        self._stops[slots] = torch.tensor(stops, dtype=torch.int64, device=self._device)

    def fed(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and absolute positions that the slots `order` [n] feed next."""
        rows = self._integers[order]
        return rows[:, _TOKEN], rows[:, _POSITION]

    def sample(self, order: Tensor, logits: Tensor) -> Tensor:
        """Sample one token per slot of `order` from logits [n, vocab]; log it.

        Returns [n] bool: the token is one of the slot's stop tokens.
        """
        rows = self._integers[order]
        state, position = rows[:, _SEED_STATE, None], rows[:, _POSITION, None]
        sampled = self._sampler.sample(logits, self._temperature[order], state, position)
        counts = rows[:, _COUNT]
        self._tokens[order, counts] = sampled.tokens.int()
        self._logprobs[order, counts] = sampled.logprobs
        rows[:, _TOKEN] = sampled.tokens
        rows[:, _POSITION : _COUNT + 1] += 1
        rows[:, _NEAR_TIES] += sampled.near_ties
        self._integers[order] = rows
        stopped: Tensor = (self._stops[order] == sampled.tokens[:, None]).any(dim=-1)
        return stopped

    def logs(self, slots: Sequence[int]) -> list[SlotLog]:
        """What these slots have sampled so far."""
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        integers = self._integers[index].tolist()
        width = max((row[_COUNT] for row in integers), default=0)
        tokens = self._tokens[index, :width].cpu()
        logprobs = self._logprobs[index, :width].cpu()
        return [
            SlotLog(
                token_ids=tokens[place, : row[_COUNT]].tolist(),
                logprobs=logprobs[place, : row[_COUNT]].tolist(),
                near_ties=row[_NEAR_TIES],
            )
            for place, row in enumerate(integers)
        ]

    def tokens(self, slots: Sequence[int], start: int, end: int) -> list[list[int]]:
        """What these slots sampled from place `start` to `end` since their admission.

        Behind a slot's own count the values are leftovers.
        """
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        found: list[list[int]] = self._tokens[index, start:end].tolist()
        return found

    def _widen(self, tokens: int, stops: int) -> None:
        """Have room for so many tokens and stop tokens per slot."""
        slot_count, width = self._tokens.shape
        if tokens > width:
            room = 1 << (tokens - 1).bit_length()
            for name in ("_tokens", "_logprobs"):
                old: Tensor = getattr(self, name)
                new = torch.zeros((slot_count, room), dtype=old.dtype, device=self._device)
                new[:, :width] = old
                setattr(self, name, new)
        if stops > self._stops.shape[1]:
            padding = (slot_count, stops - self._stops.shape[1])
            more = torch.full(padding, _NO_TOKEN, dtype=torch.int64, device=self._device)
            self._stops = torch.cat([self._stops, more], dim=1)
