"""The metrics of a step, by name; what FinishStep returns and metrics.jsonl keeps."""

from __future__ import annotations

import math

from services.trainer.update import UpdateOutcome


def step_metrics(
    outcome: UpdateOutcome,
    *,
    trained_responses: int,
    accumulate_seconds: float,
    update_seconds: float,
) -> dict[str, float]:
    """Names as in README.md. The times of checkpoint and publication are added later."""
    sums = outcome.sums
    padding = sums.padded_tokens - sums.real_tokens
    return {
        "loss": sums.loss / outcome.normaliser,
        "grad_norm": outcome.grad_norm,
        "entropy": sums.per_token(sums.entropy),
        "mismatch_kl": sums.per_token(sums.mismatch_kl),
        "mismatch_ratio_max": sums.mismatch_ratio_max,
        "clip_fraction": sums.per_token(sums.clipped_tokens),
        "reference_kl": sums.per_token(sums.reference_kl),
        "correction_weight": sums.per_token(sums.correction),
        "advantage_rms": math.sqrt(sums.squared_advantage / sums.rows) if sums.rows else 0.0,
        "trained_tokens": sums.trained_tokens,
        "trained_responses": trained_responses,
        "micro_batches": sums.micro_batches,
        "padding_share": padding / sums.padded_tokens if sums.padded_tokens else 0.0,
        "skipped_update": float(outcome.skipped),
        "learning_rate": outcome.learning_rate,
        "accumulate_seconds": accumulate_seconds,
        "update_seconds": update_seconds,
    }
