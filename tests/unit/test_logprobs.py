"""Log-probabilities and entropies against log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from services.trainer import logprobs as logprobs_module


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
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", chunk_elements)
    logits, token_ids = random_logits(13, 17)
    reference = logits.detach().clone().requires_grad_()
    everything = torch.log_softmax(reference / temperature, dim=-1)
    weights = torch.linspace(-1, 2, 13, dtype=torch.float64)
    expected_entropies = -(everything.exp() * everything).sum(-1)
    (everything[torch.arange(13), token_ids] * weights).sum().backward(retain_graph=True)

    logprobs, entropies = logprobs_module.token_logprobs(logits, token_ids, temperature)
    (logprobs * weights).sum().backward(retain_graph=True)

    torch.testing.assert_close(logprobs, everything[torch.arange(13), token_ids])
    torch.testing.assert_close(entropies, expected_entropies)
    torch.testing.assert_close(logits.grad, reference.grad)
    (entropies * weights.flip(0) + logprobs).sum().backward()
    (
        expected_entropies * weights.flip(0) + everything[torch.arange(13), token_ids]
    ).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad)


def test_logprobs_of_bfloat16_logits_are_computed_in_float32():
    logits, token_ids = random_logits(7, 50, torch.bfloat16)
    logprobs, _ = logprobs_module.token_logprobs(logits, token_ids, 1.0)
    exact = torch.log_softmax(logits.detach().float(), -1)[torch.arange(7), token_ids]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.detach(), exact)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
