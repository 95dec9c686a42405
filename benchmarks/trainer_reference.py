"""What a step's gradient must be: the whole batch at once, in float64, written from the papers.

Shares no code with `services.trainer` but its settings. One response at a time, no padding, no
sharding, no chunks; the sum over all responses is one number, and its gradient the reference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollpacker.types import PromptGroup, ScoredResponse
from services.trainer.settings import OpenRunSettings

PER_RESPONSE = ("rloo", "gspo")  # one ratio per response
_SHIFTS = (0.5, -0.5, 0.05, -0.05)  # of log ratios; far from every usual clip bound


def reference_gradients(
    directory: Path, settings: OpenRunSettings, temperature: float, groups: Sequence[PromptGroup]
) -> dict[str, Tensor]:
    """The un-normalised gradient of each weight, in float64, by name."""
    policy, initial = load_float64(directory), load_float64(directory)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for scored in group.responses:
            loss = _response_loss(policy, initial, settings, temperature, group, scored)
            total = total + group.selection_weight * loss
    total.backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in policy.named_parameters()
    }


def load_float64(directory: Path) -> nn.Module:
    """The model, in float64."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    return model


def with_shifted_logprobs(
    directory: Path, algorithm: str, temperature: float, groups: Sequence[PromptGroup]
) -> list[PromptGroup]:
    """The groups with rollout logprobs that are off, so that about half of the ratios clip.

    A ratio is e^0.5, e^-0.5, e^0.05 or e^-0.05: none is near a bound, where rounding would decide.
    """
    model = load_float64(directory)
    noise = random.Random(algorithm)
    shifted = []
    for group in groups:
        responses = []
        for scored in group.responses:
            exact = _logprobs(model, group, scored, temperature)[0].detach().tolist()
            shifts = _shifts(noise, algorithm, len(exact))
            moved = tuple(p - shift for p, shift in zip(exact, shifts, strict=True))
            responses.append(replace(scored, response=replace(scored.response, logprobs=moved)))
        shifted.append(replace(group, responses=tuple(responses)))
    return shifted


def _shifts(noise: random.Random, algorithm: str, count: int) -> list[float]:
    """By how much log p - log p_old differs from 0, token by token."""
    if algorithm not in PER_RESPONSE:
        return [noise.choice(_SHIFTS) for _ in range(count)]
    shift = noise.choice(_SHIFTS)
    return [shift if algorithm == "gspo" else shift / max(1, count)] * count


def _logprobs(
    model: nn.Module, group: PromptGroup, scored: ScoredResponse, temperature: float
) -> tuple[Tensor, Tensor]:
    """log p of the response's tokens, and entropies, [tokens]."""
    prompt, tokens = group.prompt_token_ids, scored.response.token_ids
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    law = torch.log_softmax(logits / temperature, -1)
    return law[torch.arange(len(tokens)), list(tokens)], -(law.exp() * law).sum(-1)


def _response_loss(
    policy: nn.Module,
    initial: nn.Module,
    settings: OpenRunSettings,
    temperature: float,
    group: PromptGroup,
    scored: ScoredResponse,
) -> Tensor:
    response = scored.response
    trained = [i for s in [_trained(scored)] for i, yes in enumerate(s) if yes]
    if not trained:
        return torch.zeros((), dtype=torch.float64)
    new, entropy = (x[trained] for x in _logprobs(policy, group, scored, temperature))
    with torch.no_grad():
        base = _logprobs(initial, group, scored, temperature)[0][trained]
    rollout = torch.tensor(response.logprobs, dtype=torch.float64)[trained]
    old = rollout if settings.old_logprobs == "rollout" else new.detach()
    advantage = scored.advantage if scored.reward is not None else 0.0
    tokens = -_objective(settings, new, old, advantage)
    if settings.rollout_correction != "none":
        weight, cap = (new.detach() - rollout).exp(), settings.rollout_correction_cap
        over = cap if settings.rollout_correction == "truncated" else 0.0
        tokens = tokens * torch.where(weight > cap, over, weight)
    ratio = base - new
    kl = {"k1": -ratio, "k2": ratio**2 / 2, "k3": ratio.exp() - 1 - ratio}[settings.kl_estimator]
    tokens = tokens + settings.kl_coefficient * kl - settings.entropy_coefficient * entropy
    return tokens.mean() if settings.resolved_normaliser == "response_mean" else tokens.sum()


def _trained(scored: ScoredResponse) -> list[bool]:
    return [s.trainable for s in scored.response.segments for _ in range(s.token_count)]


def _objective(settings: OpenRunSettings, new: Tensor, old: Tensor, advantage: float) -> Tensor:
    """What is maximised, per token; a response's single number is spread evenly."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.algorithm == "cispo":
        return (new - old).exp().detach().clip(low, high) * advantage * new
    if settings.algorithm == "rloo":
        ratio = ((new - old).sum()).exp().expand(len(new))
    elif settings.algorithm == "gspo":
        ratio = ((new - old).mean()).exp().expand(len(new))
    else:
        ratio = (new - old).exp()
    clipped = ratio.clip(low, high) * advantage
    return torch.where(ratio * advantage < clipped, ratio * advantage, clipped)


def clipped_shares(
    directory: Path, settings: OpenRunSettings, temperature: float, groups: Sequence[PromptGroup]
) -> tuple[float, float]:
    """Shares of the trained tokens whose ratio is below, and above, what the clip allows."""
    model = load_float64(directory)
    below = above = total = 0
    for group in groups:
        for scored in group.responses:
            new = _logprobs(model, group, scored, temperature)[0].detach()
            if not len(new):
                continue
            difference = new - torch.tensor(scored.response.logprobs, dtype=torch.float64)
            if settings.algorithm in PER_RESPONSE:
                whole = difference.sum() if settings.algorithm == "rloo" else difference.mean()
                difference = whole.expand(len(new))
            below += int((difference.exp() < 1 - settings.clip_low).sum())
            above += int((difference.exp() > 1 + settings.clip_high).sum())
            total += len(new)
    return below / max(1, total), above / max(1, total)
