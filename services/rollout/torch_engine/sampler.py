"""Sampling of many tokens at once: Gumbel-max with counter-based noise.

One definition for both ways a token comes about: decoded, or found in a draft and confirmed. A
row is one (response, position); rows do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker import sampling

_CPU_NOISE_CELLS = 1 << 16  # scores computed at a time: what the cache of a core holds
_GPU_NOISE_CELLS = 1 << 24


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row, each [n]."""

    tokens: Tensor  # int64
    logprobs: Tensor  # natural log at the sampling temperature, <= 0
    near_ties: Tensor  # bool: the two best perturbed scores were closer than 1e-4


class Sampler:
    """Samples from logits over one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocabulary = torch.arange(vocab_size, device=device)
        self._cells = _CPU_NOISE_CELLS if device.type == "cpu" else _GPU_NOISE_CELLS

    def sample(
        self, logits: Tensor, temperature: Tensor, seed_state: Tensor, position: Tensor
    ) -> Sampled:
        """Sample from logits [n, vocab] / temperature [n, 1].

        `seed_state` [n, 1] as `sampling.seed_state`; `position` [n, 1] of the token fed last.
        """
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        best, tokens, second = self._best_two(logprobs, seed_state, position)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].clamp_(max=0)
        return Sampled(tokens, chosen, best - second < sampling.NEAR_TIE)

    def _best_two(
        self, logprobs: Tensor, state: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Best perturbed score, its token, and the second best score, each [n].

        A large vocabulary is taken in pieces, so that the noise stays in the processor's cache.
        """
        width = max(2, self._cells // len(logprobs))
        values, tokens = [], []
        for start in range(0, len(self._vocabulary), width):
            ids, part = self._vocabulary[start : start + width], logprobs[:, start : start + width]
            bits = sampling.noise_bits(state, position, ids)
            scores = sampling.gumbel(bits, torch).add_(part)
            best = scores.topk(min(2, len(ids)), dim=-1)
            values.append(best.values)
            tokens.append(ids[best.indices])
        if len(values) == 1 and len(self._vocabulary) > 1:
            return values[0][:, 0], tokens[0][:, 0], values[0][:, 1]
        values.append(torch.full_like(values[0][:, :1], float("-inf")))  # for a single token
        best = torch.cat(values, dim=1).topk(2, dim=-1)
        token = torch.cat(tokens, dim=1).gather(1, best.indices[:, :1])
        return best.values[:, 0], token[:, 0], best.values[:, 1]
