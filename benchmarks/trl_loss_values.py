"""TRL's losses and gradients on fixed numbers, as one JSON object: tests/unit/trl_loss_values.json.

TRL is no dependency. In an environment of its own, with torch and transformers:

    pip install --no-deps trl==1.16.0 accelerate==1.15.0 datasets pyarrow pandas dill multiprocess
    python benchmarks/trl_loss_values.py > tests/unit/trl_loss_values.json

TRL's loss is a method of its trainers; it is called here on a bare object that holds the numbers.
"""

from __future__ import annotations

import collections
import json
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

NEW = [[-0.3, -1.2, -0.7, -2.0], [-0.9, -0.4, -1.6, -0.2], [-1.1, -0.8, -0.5, -3.0]]
OLD = [[-0.7, -1.25, -0.2, -1.9], [-0.5, -0.9, -1.55, -0.6], [-1.6, -0.4, -0.55, -1.0]]
REFERENCE = [[-0.5, -1.0, -0.9, -2.5], [-0.8, -0.6, -1.4, -0.1], [-1.3, -0.7, -0.6, -1.0]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
ADVANTAGES = [1.5, -0.75, -0.75]
CAP = 5
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo with k3": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},  # the bound itself, not its distance
    "rloo": {"trainer": RLOOTrainer},
}


class OneProcess:
    """What the losses ask of an accelerator."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:  # noqa: ARG002
        return values


def values_of(
    *,
    trainer: Any = GRPOTrainer,
    loss_type: str = "grpo",
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    epsilon_high: float = 0.28,
) -> dict[str, Any]:
    """TRL's loss and its gradient by the new logprobs, in float64."""
    new = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    old, reference, mask = (torch.tensor(v, dtype=torch.float64) for v in (OLD, REFERENCE, MASK))
    held = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=importance_sampling_level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=epsilon_high,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=CAP,
        _entropy_bonus_enabled=False,
        accelerator=OneProcess(),
        _metrics={"train": collections.defaultdict(list)},
    )
    ids = torch.zeros(len(NEW), len(NEW[0]), dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(held, None, inputs)
    loss.backward()
    assert new.grad is not None
    return {"loss": loss.item(), "gradient": new.grad.tolist()}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "new": NEW,
                "old": OLD,
                "reference": REFERENCE,
                "mask": MASK,
                "advantages": ADVANTAGES,
                "response_cap": CAP,
                "cases": {name: values_of(**case) for name, case in CASES.items()},
            },
            indent=1,
        )
    )
