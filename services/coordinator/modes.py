"""Modes and algorithms are values: the run's settings as the rules that the policy follows."""

from __future__ import annotations

from rollpacker.algorithms import ALGORITHMS
from rollpacker.policy.advantages import AdvantageRules, OverlongShaping
from rollpacker.policy.tail_batching import RaceKind, TailBatchingRules
from rollpacker.settings import RunSettings


def tail_batching_rules(settings: RunSettings) -> TailBatchingRules:
    """The rules of the run's mode, with its own numbers."""
    tail = settings.tail_batching
    return TailBatchingRules(
        prompts_per_step=tail.prompts_per_step,
        responses_per_prompt=tail.responses_per_prompt,
        speculation_factors=tail.resolved_speculation_factors,
        response_speculation_factor=tail.resolved_response_speculation_factor,
        race=RaceKind.ARRIVAL if tail.mode == "paper" else RaceKind.TOKENS,
        keeps_seeds=tail.mode != "paper",
        streams=tail.mode != "synchronous",
        max_deferral_age=tail.max_deferral_age,
        advantages=advantage_rules(settings),
        dynamic_sampling=tail.dynamic_sampling,
        tensor_parallel_sizes=tail.resolved_tensor_parallel_sizes,
        selection_weights=tail.resolved_selection_weights,
    )


def advantage_rules(settings: RunSettings) -> AdvantageRules:
    """How the run's algorithm computes advantages."""
    trainer = settings.trainer
    overlong = None
    if trainer.overlong_buffer_tokens:
        overlong = OverlongShaping(
            cap_tokens=settings.sampling.max_response_tokens,
            buffer_tokens=trainer.overlong_buffer_tokens,
            penalty=trainer.overlong_penalty,
        )
    return AdvantageRules(
        estimator=ALGORITHMS[trainer.algorithm].estimator,
        deviation=trainer.advantage_deviation or 1.0,
        overlong=overlong,
    )
