"""The loss against formulas that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer import loss


def random_logits(positions: int, vocabulary: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(positions * 1000 + vocabulary)
    logits = torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 3
    token_ids = torch.randint(0, vocabulary, (positions,), generator=generator)
    return logits.to(dtype).requires_grad_(), token_ids


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 24])
def test_token_logprobs_and_their_gradient_are_those_of_log_softmax_at_the_temperature(
    monkeypatch, temperature, chunk_elements
):
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", chunk_elements)
    logits, token_ids = random_logits(13, 17)
    reference = logits.detach().clone().requires_grad_()
    everything = torch.log_softmax(reference / temperature, dim=-1)
    weights = torch.linspace(-1, 2, 13, dtype=torch.float64)
    (everything[torch.arange(13), token_ids] * weights).sum().backward()

    logprobs, entropies = loss.token_logprobs(logits, token_ids, temperature)
    (logprobs * weights).sum().backward()

    torch.testing.assert_close(logprobs, everything[torch.arange(13), token_ids])
    torch.testing.assert_close(entropies, -(everything.exp() * everything).sum(-1))
    torch.testing.assert_close(logits.grad, reference.grad)
    assert not entropies.requires_grad


def test_logprobs_of_bfloat16_logits_are_computed_in_float32():
    logits, token_ids = random_logits(7, 50, torch.bfloat16)
    logprobs, _ = loss.token_logprobs(logits, token_ids, 1.0)
    exact = torch.log_softmax(logits.detach().float(), -1)[torch.arange(7), token_ids]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.detach(), exact)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def surrogate_by_hand(new, old, advantage, low, high):
    """PPO's clipped objective, written as its cases. Returns (loss, d loss / d new)."""
    ratio = math.exp(new - old)
    if advantage >= 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def test_clipped_surrogate_is_the_sum_of_the_cases_with_both_sides_clipped():
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(200, generator=generator, dtype=torch.float64).requires_grad_()
    old = new.detach() + 0.4 * torch.randn(200, generator=generator, dtype=torch.float64)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    mask = torch.rand(200, generator=generator) < 0.8
    result = loss.clipped_surrogate(new, old, advantages, mask, clip_low=0.2, clip_high=0.28)
    result.loss.backward()

    by_hand = [
        surrogate_by_hand(n, o, a, 0.2, 0.28) if kept else (0.0, 0.0)
        for n, o, a, kept in zip(
            new.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), strict=True
        )
    ]
    ratio = torch.exp(new.detach() - old)
    high = (mask & (advantages >= 0) & (ratio > 1.28)).sum()
    low = (mask & (advantages < 0) & (ratio < 0.8)).sum()
    assert high > 0.1 * 80
    assert low > 0.1 * 80
    assert result.clipped_tokens == high + low
    assert result.loss.item() == pytest.approx(sum(value for value, _ in by_hand), rel=1e-12)
    torch.testing.assert_close(
        new.grad, torch.tensor([slope for _, slope in by_hand], dtype=torch.float64)
    )


@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.2, 0.28), (0.0, 0.0)])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_advantage(clip_low, clip_high):
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.5, -2.0, 0.0])
    mask = torch.ones(3, dtype=torch.bool)
    result = loss.clipped_surrogate(
        new, new.detach(), advantages, mask, clip_low=clip_low, clip_high=clip_high
    )
    result.loss.backward()
    assert result.clipped_tokens == 0
    torch.testing.assert_close(new.grad, -advantages)


@given(st.lists(st.sampled_from([math.inf, -math.inf, math.nan, -1.0]), min_size=1, max_size=5))
def test_a_position_outside_the_mask_adds_exactly_zero_whatever_it_holds(values):
    new = torch.tensor([-1.0] * len(values), requires_grad=True)
    old = torch.tensor(values)
    mask = torch.zeros(len(values), dtype=torch.bool)
    result = loss.clipped_surrogate(
        new, old, torch.full((len(values),), 3.0), mask, clip_low=0.2, clip_high=0.2
    )
    result.loss.backward()
    distance = loss.mismatch(old, new.detach(), mask)
    assert result.loss.item() == 0.0
    assert result.clipped_tokens == 0
    assert new.grad is not None
    assert new.grad.tolist() == [0.0] * len(values)
    assert (distance.kl_sum.item(), distance.ratio_max.item()) == (0.0, 1.0)


def test_mismatch_is_k3_summed_and_the_largest_ratio_either_way():
    old = torch.tensor([-1.0, -2.0, -3.0, -9.0], dtype=torch.float64)
    rollout = torch.tensor([-1.5, -1.0, -3.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    result = loss.mismatch(old, rollout, mask)
    differences = [0.5, -1.0, 0.0]
    expected = sum(math.exp(d) - 1 - d for d in differences)
    assert result.kl_sum.item() == pytest.approx(expected, rel=1e-12)
    assert result.ratio_max.item() == pytest.approx(math.e, rel=1e-12)
