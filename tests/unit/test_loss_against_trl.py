"""The whole loss against TRL 1.16.0: values recorded by benchmarks/trl_loss_values.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.trainer.objective import TokenValues, objective
from tests.trainer_support import trainer_settings

RECORDED = json.loads(Path(__file__).with_name("trl_loss_values.json").read_text())
# A step of one prompt with three responses. TRL's dapo and cispo divide by the trained tokens.
SETTINGS = {
    "grpo": {"algorithm": "grpo"},
    "grpo with k3": {"algorithm": "grpo", "kl_coefficient": 0.1, "kl_estimator": "k3"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dapo": {"algorithm": "dapo", "normaliser": "step_tokens"},
    "gspo": {"algorithm": "gspo"},
    "cispo": {"algorithm": "cispo", "normaliser": "step_tokens", "clip_low": 1.0},
    "rloo": {"algorithm": "rloo"},
}


def test_every_recorded_case_is_compared():
    assert RECORDED["cases"].keys() == SETTINGS.keys()


@pytest.mark.parametrize("case", SETTINGS)
def test_loss_and_gradient_are_those_of_trl(case):
    settings = trainer_settings(
        prompts_per_step=1,
        responses_per_prompt=3,
        max_response_tokens=RECORDED["response_cap"],
        old_logprobs="rollout",
        **SETTINGS[case],
    )
    new, old, reference, advantages = (
        torch.tensor(RECORDED[name], dtype=torch.float64)
        for name in ("new", "old", "reference", "advantages")
    )
    new.requires_grad_()
    mask = torch.tensor(RECORDED["mask"], dtype=torch.bool)
    terms = objective(
        settings,
        TokenValues(
            logprobs=new,
            entropies=torch.zeros_like(new),
            rollout_logprobs=old,
            reference_logprobs=reference if settings.kl_coefficient else None,
            advantages=advantages.unsqueeze(1).expand_as(mask),
            selection_weights=torch.ones_like(mask, dtype=torch.float64),
            mask=mask,
        ),
    )
    loss = terms.loss / (settings.fixed_normaliser() or terms.trained_tokens)
    loss.backward()
    expected = RECORDED["cases"][case]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-12)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor(expected["gradient"], dtype=torch.float64))
