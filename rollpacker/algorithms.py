"""The algorithms that `trainer.algorithm` names, as values: nothing here computes anything.

An algorithm is three choices. The coordinator reads the estimator (advantages are group-local and
live in the policy), the trainer reads the surrogate, the settings read the normaliser. A new
algorithm is a new row, never a copied loop.

| algorithm | source |
|---|---|
| grpo | arXiv 2402.03300 |
| dr_grpo | arXiv 2503.20783: no division by deviation or by response length |
| dapo | arXiv 2503.14476: asymmetric clipping, every token weighs the same, overlong shaping |
| rloo | arXiv 2402.14740: leave-one-out baseline, the whole response is one action |
| reinforce_plus_plus | arXiv 2501.03262, the variant with the group's mean as baseline |
| gspo | arXiv 2507.18071: the ratio of a response is the geometric mean over its tokens |
| cispo | arXiv 2506.13585: the clipped ratio weighs log p and has no gradient |
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "gspo", "cispo"]
NormaliserName = Literal["response_mean", "response_cap", "constant", "step_tokens"]


class Estimator(enum.Enum):
    """How an advantage follows from the rewards of its group."""

    STANDARDISED = "standardised"  # (reward - mean) / (deviation of the group + 1e-6)
    CENTRED = "centred"  # reward - mean
    LEAVE_ONE_OUT = "leave_one_out"  # reward - mean of the others
    SCALED = "scaled"  # (reward - mean) / a declared deviation


class Surrogate(enum.Enum):
    """Which function of the ratio is maximised; `services.trainer.loss` has the formulas."""

    CLIPPED = "clipped"  # token by token
    WHOLE_RESPONSE = "whole_response"  # ratio of whole responses
    GEOMETRIC_MEAN = "geometric_mean"  # geometric mean of a response's ratios
    WEIGHT = "weight"  # ratio as a weight without gradient


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table."""

    estimator: Estimator
    surrogate: Surrogate
    normaliser: NormaliserName  # unless the run names another one

    @property
    def weighs_whole_responses(self) -> bool:
        """Whether a response has one ratio, so that its loss cannot be summed over tokens."""
        return self.surrogate in (Surrogate.WHOLE_RESPONSE, Surrogate.GEOMETRIC_MEAN)


ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "grpo": Algorithm(Estimator.STANDARDISED, Surrogate.CLIPPED, "response_mean"),
    "dr_grpo": Algorithm(Estimator.CENTRED, Surrogate.CLIPPED, "response_cap"),
    "dapo": Algorithm(Estimator.STANDARDISED, Surrogate.CLIPPED, "response_cap"),
    "rloo": Algorithm(Estimator.LEAVE_ONE_OUT, Surrogate.WHOLE_RESPONSE, "response_mean"),
    "reinforce_plus_plus": Algorithm(Estimator.SCALED, Surrogate.CLIPPED, "response_cap"),
    "gspo": Algorithm(Estimator.STANDARDISED, Surrogate.GEOMETRIC_MEAN, "response_mean"),
    "cispo": Algorithm(Estimator.STANDARDISED, Surrogate.WEIGHT, "response_cap"),
}
