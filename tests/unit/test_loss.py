"""The loss against formulas that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.algorithms import Surrogate
from services.trainer import loss

CLIP = loss.Clip(0.2, 0.28)
ROWS, COLUMNS = 20, 12
every_surrogate = pytest.mark.parametrize("kind", Surrogate, ids=lambda kind: kind.value)


def random_batch(spread=0.4):
    """(new with gradient, old, advantages, mask), all [ROWS, COLUMNS], in float64."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    new = (-noise(ROWS, COLUMNS).abs()).requires_grad_()
    old = new.detach() + spread * noise(ROWS, COLUMNS)
    mask = torch.rand(ROWS, COLUMNS, generator=generator) < 0.8
    return new, old, noise(ROWS, 1).expand(ROWS, COLUMNS), mask


def clipped_by_hand(ratio, advantage):
    """PPO's clipped objective, written as its cases. Returns (loss, d loss / d log ratio)."""
    if advantage >= 0 and ratio > 1.28:
        return -1.28 * advantage, 0.0
    if advantage < 0 and ratio < 0.8:
        return -0.8 * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def response_by_hand(kind, new, old, advantage):
    """(losses, d (sum of losses) / d new, clipped tokens) of the trained tokens of a response."""
    differences = [n - o for n, o in zip(new, old, strict=True)]
    count = len(new)
    if kind is Surrogate.WEIGHT:
        weights = [min(max(math.exp(d), 0.8), 1.28) for d in differences]
        losses = [-w * advantage * n for w, n in zip(weights, new, strict=True)]
        held = sum(not 0.8 <= math.exp(d) <= 1.28 for d in differences)
        return losses, [-w * advantage for w in weights], held
    if kind is Surrogate.CLIPPED:
        cases = [clipped_by_hand(math.exp(d), advantage) for d in differences]
        held = sum(slope == 0.0 for _, slope in cases)
        return [value for value, _ in cases], [slope for _, slope in cases], held
    total = sum(differences) / (count if kind is Surrogate.GEOMETRIC_MEAN else 1)
    value, slope = clipped_by_hand(math.exp(total), advantage)
    each = slope if kind is Surrogate.GEOMETRIC_MEAN else slope * count
    return [value] * count, [each] * count, count * (slope == 0.0)


@every_surrogate
def test_a_surrogate_is_the_cases_of_its_paper_with_both_sides_clipped(kind):
    new, old, advantages, mask = random_batch(0.4 if kind is not Surrogate.GEOMETRIC_MEAN else 1.2)
    result = loss.SURROGATES[kind](new, old, advantages, mask, CLIP)
    result.losses.sum().backward()

    held = {True: 0, False: 0}
    for row in range(ROWS):
        kept = mask[row]
        values = new[row, kept].tolist(), old[row, kept].tolist(), advantages[row, 0].item()
        losses, slopes, clipped = response_by_hand(kind, *values)
        assert result.losses[row, kept].tolist() == pytest.approx(losses, rel=1e-12)
        assert new.grad[row, kept].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
        assert int(result.clipped[row].sum()) == clipped
        held[values[2] >= 0] += clipped
    assert new.grad[~mask].abs().max() == 0
    assert min(held.values()) > 0.1 * int(mask.sum()) / 2  # of the tokens with that sign


@every_surrogate
@pytest.mark.parametrize("clip", [CLIP, loss.Clip(0.0, 0.0)])
def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_the_policy_gradient(kind, clip):
    new = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    advantages = torch.full((1, 3), 1.5, dtype=torch.float64)
    result = loss.SURROGATES[kind](new, new.detach(), advantages, mask, clip)
    result.losses.sum().backward()
    each = -3.0 if kind is Surrogate.WHOLE_RESPONSE else -1.5
    assert not result.clipped.any()
    assert new.grad.tolist() == [[each, each, 0.0]]


broken = st.sampled_from([math.inf, -math.inf, math.nan, -1.0])


@every_surrogate
@given(values=st.lists(broken, min_size=1, max_size=5))
def test_a_position_outside_the_mask_adds_exactly_zero_whatever_it_holds(kind, values):
    new = torch.full((1, len(values)), -1.0, requires_grad=True)
    old = torch.tensor([values])
    mask = torch.zeros(1, len(values), dtype=torch.bool)
    result = loss.SURROGATES[kind](new, old, torch.full_like(new, 3.0), mask, CLIP)
    kl = loss.divergence(new, old, mask, "k3")
    total = loss.per_response(result.losses + kl, mask).sum()
    total.backward()
    distance = loss.mismatch(old, new.detach(), mask)
    weights = loss.correction_weights(old, new.detach(), mask, "truncated", 2.0)
    assert (total.item(), result.clipped.any().item()) == (0.0, False)
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0] * len(values)]
    assert weights.tolist() == [[1.0] * len(values)]
    assert (distance.kl_sum.item(), distance.ratio_max.item()) == (0.0, 1.0)


def test_mismatch_is_k3_summed_and_the_largest_ratio_either_way():
    old = torch.tensor([[-1.0, -2.0, -3.0, -9.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.5, -1.0, -3.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    result = loss.mismatch(old, rollout, mask)
    differences = [0.5, -1.0, 0.0]
    expected = sum(math.exp(d) - 1 - d for d in differences)
    assert result.kl_sum.item() == pytest.approx(expected, rel=1e-12)
    assert result.ratio_max.item() == pytest.approx(math.e, rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda p, q: p - q, lambda p, q: 1.0),
        ("k2", lambda p, q: 0.5 * (p - q) ** 2, lambda p, q: p - q),
        ("k3", lambda p, q: math.exp(q - p) - 1 + p - q, lambda p, q: 1 - math.exp(q - p)),
    ],
)
def test_each_divergence_estimator_is_its_formula_and_its_derivative(estimator, value, slope):
    policy = torch.tensor([[-1.0, -2.0, -0.1]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -0.5, -0.1]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    kl = loss.divergence(policy, reference, mask, estimator)
    kl.sum().backward()
    pairs = list(zip(policy[0].tolist(), reference[0].tolist(), strict=True))
    assert kl[0].tolist() == pytest.approx([value(*pair) for pair in pairs], abs=1e-12)
    assert policy.grad[0].tolist() == pytest.approx([slope(*pair) for pair in pairs], abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_divergence_estimate_is_the_divergence_on_average(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    estimates = loss.divergence(policy[None], reference[None], mask, estimator)[0]
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * estimates).sum().item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_a_divergence_loss_points_where_the_divergence_falls(estimator):
    logits = torch.tensor([0.4, 0.1, -0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    exact_policy = torch.log_softmax(logits, -1)
    exact = (exact_policy.exp() * (exact_policy - reference)).sum()
    (gradient,) = torch.autograd.grad(exact, logits)
    policy = torch.log_softmax(logits, -1)
    estimates = loss.divergence(
        policy[None], reference[None], torch.ones(1, 3, dtype=torch.bool), estimator
    )[0]
    (sampled,) = torch.autograd.grad((policy.detach().exp() * estimates).sum(), logits)
    if estimator == "k2":
        torch.testing.assert_close(sampled, gradient)
    assert torch.dot(sampled, gradient) > 0


def test_correction_weights_are_truncated_or_masked_above_the_cap_without_gradient():
    old = torch.tensor([[0.0, -1.0, -2.0, -1.0]], requires_grad=True)
    rollout = torch.tensor([[-2.0, -1.5, -1.0, math.nan]])
    mask = torch.tensor([[True, True, True, False]])
    exact = [math.exp(2.0), math.exp(0.5), math.exp(-1.0), 1.0]
    arguments = (old, rollout, mask)
    truncated = loss.correction_weights(*arguments, "truncated", 2.0)
    masked = loss.correction_weights(*arguments, "masked", 2.0)
    assert truncated[0].tolist() == pytest.approx([2.0, *exact[1:]], rel=1e-6)
    assert masked[0].tolist() == pytest.approx([0.0, *exact[1:]], rel=1e-6)
    assert loss.correction_weights(*arguments, "none", 2.0)[0].tolist() == [1.0] * 4
    assert not truncated.requires_grad


def test_per_response_makes_the_mean_of_each_response_and_zero_of_none():
    losses = torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert loss.per_response(losses, mask).sum(-1).tolist() == [2.0, 0.0]
