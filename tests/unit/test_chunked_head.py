"""Logprobs without logits: the same numbers and gradients, and no tensor as large as the logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM

from services.trainer import logprobs as logprobs_module
from services.trainer import model as model_module
from services.trainer.chunked_head import can_replace_head
from services.trainer.model import PolicyModel
from tests.trainer_support import VOCABULARY, make_model

INPUT_IDS = torch.tensor([[5, 6, 7, 8, 9, 1], [2, 3, 4, 0, 0, 0]])
TARGET_IDS = torch.tensor([[8, 9, 1, 4], [0, 1, 2, 3]])
CHUNK_POSITIONS = 3
HIDDEN = 32


def passes(directory, dtype, weights):
    """Logprobs, entropies, and the gradients of a sum of both, by name."""
    model = PolicyModel(directory, dtype, torch.device("cpu"), None)
    logprobs, entropies = model.logprobs(INPUT_IDS, TARGET_IDS, 0.7)
    (logprobs * weights + entropies * weights.flip(0)).sum().backward()
    return logprobs, entropies, {n: p.grad for n, p in model.module.named_parameters()}


@pytest.fixture
def chunked(monkeypatch):
    def switch():
        monkeypatch.setattr(model_module, "_WHOLE_LOGITS", 0)
        monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", CHUNK_POSITIONS * VOCABULARY)

    return switch


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)]
)
def test_values_and_gradients_are_those_of_whole_logits(tmp_path, chunked, tied, dtype, tolerance):
    directory = make_model(tmp_path, tied=tied)
    weights = torch.linspace(-1, 2, 8).view(2, 4)
    expected = passes(directory, dtype, weights)
    chunked()
    actual = passes(directory, dtype, weights)
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for name, gradient in expected[2].items():
        scale = gradient.abs().max()
        assert (actual[2][name] - gradient).abs().max() <= tolerance * scale, name


class LargestLogits(TorchDispatchMode):
    """Notes the largest tensor whose last dimension is the vocabulary."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or tensor.shape[-1:] != (VOCABULARY,):
                continue
            if tensor.shape != (HIDDEN, VOCABULARY):  # that is the weight
                self.largest = max(self.largest, tensor.numel())
        return result


def test_the_logits_of_a_response_never_exist_whole(tmp_path, chunked):
    directory = make_model(tmp_path)
    with LargestLogits() as whole:
        passes(directory, "float32", torch.ones(2, 4))
    chunked()
    with LargestLogits() as in_chunks:
        passes(directory, "float32", torch.ones(2, 4))
    assert whole.largest == 8 * VOCABULARY
    assert in_chunks.largest == CHUNK_POSITIONS * VOCABULARY


def test_a_model_that_scales_its_logits_keeps_them():
    config = CohereConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, logit_scale=0.5,
    )  # fmt: skip
    assert not can_replace_head(CohereForCausalLM(config))
