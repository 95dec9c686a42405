"""The `trainer` section of the run settings: algorithm, loss and optimizer.

What an algorithm means is in `rollpacker.algorithms`; what does not fit the other sections is
refused by `RunSettings`.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollpacker.algorithms import ALGORITHMS, AlgorithmName, NormaliserName
from rollpacker.section import Section


class TrainerSettings(Section):
    """The optimizer update."""

    algorithm: AlgorithmName = Field(
        "dapo", description="chooses advantages, loss and default normaliser"
    )
    learning_rate: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, ge=0, description="ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, ge=0, description="ratio is clipped above 1 + clip_high")
    normaliser: NormaliserName | None = Field(
        None,
        description="what the summed token loss is divided by: each response's own tokens and then"
        " P0*R0 (`response_mean`), P0*R0*max_response_tokens (`response_cap`),"
        " P0*R0*normaliser_tokens (`constant`), or the step's own token count (`step_tokens`; modes"
        " paper, synchronous and overlap only: it makes a response's weight depend on its step);"
        " default by algorithm: `response_mean` for grpo, rloo and gspo, else `response_cap`",
    )
    normaliser_tokens: int = Field(0, ge=0, description="tokens per response for `constant`")
    advantage_deviation: float | None = Field(
        None,
        gt=0,
        description="what reinforce_plus_plus divides advantages by: the standard deviation of"
        " reward minus group mean, measured over whole cycles",
    )
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="the reward falls over so many tokens below the cap; 0: it does not"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="taken off a response at the cap")
    kl_coefficient: float = Field(
        0.0, ge=0, description="weight of the divergence from the initial model; 0 loads none"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="per token, with d = log reference - log policy: -d, d*d/2, exp(d)-1-d"
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    old_logprobs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="what the ratio is against: the trainer's own (one update per step, so the"
        " ratio is 1), or the engine's",
    )
    rollout_correction: Literal["none", "truncated", "masked"] = Field(
        "none",
        description="weight of a token for the difference between engine and trainer:"
        " min(w, cap), or w where it is at most the cap and else 0; w = trainer / engine",
    )
    rollout_correction_cap: float = Field(2.0, gt=0)
    micro_batch_tokens: int = Field(16384, ge=1, description="padded tokens per forward pass")
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    deterministic: bool = Field(
        True,
        description="window i of a step's groups goes to replica i mod n, so that the same groups"
        " in the same order give the same bits; else to the first replica that is free",
    )
    activation_checkpointing: bool = Field(
        False, description="keep only the input of each layer and compute it again: less memory"
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="train a LoRA adapter of this rank beside every linear layer but the"
        " head; 0: train all weights",
    )
    lora_alpha: int | None = Field(
        None, ge=1, description="the adapter counts lora_alpha / lora_rank; default 2 * lora_rank"
    )
    lora_publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="what engines get: whole weights with the adapter merged in (every engine), or"
        " the adapter beside the base weights, which are written once (embedded engine)",
    )
    offload: bool = Field(
        False,
        description="between steps keep weights and optimizer state in host memory, for an engine"
        " on the same accelerator",
    )
    keep_checkpoints: int = Field(2, ge=1)
    checkpoint_interval: int = Field(
        1,
        ge=1,
        description="steps between checkpoints; at 1 a step ends when its checkpoint is complete,"
        " above 1 the run goes on while one is written and may be taken back to the one before",
    )

    @model_validator(mode="after")
    def _normaliser_fits(self) -> Self:
        if (self.normaliser == "constant") != (self.normaliser_tokens > 0):
            raise ValueError(
                f"normaliser_tokens: {self.normaliser_tokens} with normaliser"
                f" {self.resolved_normaliser}; `constant` needs it above 0, the others leave it out"
            )
        whole = ALGORITHMS[self.algorithm].weighs_whole_responses
        if whole and self.resolved_normaliser != "response_mean":
            raise ValueError(
                f"normaliser: {self.normaliser} with algorithm {self.algorithm}, whose loss is one"
                " number per response; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_is_complete(self) -> Self:
        scaled = self.algorithm == "reinforce_plus_plus"
        if scaled != (self.advantage_deviation is not None):
            raise ValueError(
                f"advantage_deviation: {self.advantage_deviation} with algorithm {self.algorithm};"
                " reinforce_plus_plus needs it (a deviation of the batch would depend on which"
                " groups share a step; measure it over a cycle: metric trainer/advantage_rms of a"
                " run with dr_grpo), the others leave it out"
            )
        if self.old_logprobs == "rollout" and self.rollout_correction != "none":
            raise ValueError(
                f"rollout_correction: {self.rollout_correction} with old_logprobs rollout corrects"
                " the same difference twice; use one of them"
            )
        return self

    @model_validator(mode="after")
    def _adapter_has_a_rank(self) -> Self:
        if self.lora_rank == 0 and (self.lora_alpha is not None or self.lora_publish != "merged"):
            raise ValueError(
                f"lora_rank: 0 with lora_alpha {self.lora_alpha}, lora_publish {self.lora_publish};"
                " they need an adapter: set lora_rank, or leave them out"
            )
        return self

    @property
    def resolved_normaliser(self) -> NormaliserName:
        """normaliser, or the default of the algorithm."""
        return self.normaliser or ALGORITHMS[self.algorithm].normaliser
