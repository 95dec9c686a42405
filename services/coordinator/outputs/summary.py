"""summary.json: a run in sixteen figures, all computed from its files.

A figure that the files cannot give is null. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.coordinator.outputs.loaded_run import LoadedRun, mean_of, percentile


def summarize(run: LoadedRun) -> dict[str, Any]:
    """The content of summary.json. Its keys are part of the interface of a run directory."""
    first, last = _first_and_last_tenth(run.values_of("reward/mean"))
    before, after = validation_before_and_after(run)
    lengths = run.all_lengths
    return {
        "mode": run.mode,
        "steps": len(run.steps),
        "reward_first": first,
        "reward_last": last,
        "validation_before": before,
        "validation_after": after,
        "step_seconds_mean": mean_of(line.seconds for line in run.steps),
        "rollout_seconds_mean": mean_of(line.rollout_seconds for line in run.steps),
        "trained_tokens_per_second": _ratio(
            trained_tokens(run), math.fsum(line.seconds for line in run.steps)
        ),
        "response_tokens": {
            "p50": percentile(lengths, 0.50),
            "p75": percentile(lengths, 0.75),
            "p99": percentile(lengths, 0.99),
            "max": max(lengths, default=None),
        },
        "trained_groups": sum(line.trained_groups for line in run.steps),
        "deferrals": _deferrals(run),
        "undrained": _whole(run.last_of("tail/queue_length")),
        "waste": run.last_of("perf/waste"),
        "bias_ratio": run.last_of("bias/ratio"),
        "weight_version": run.steps[-1].weight_version if run.steps else 0,
    }


def validation_before_and_after(run: LoadedRun) -> tuple[float | None, float | None]:
    """Held-out score of the first and of the last measurement of the set measured first.

    The last one is None until a second measurement exists.
    """
    names = [line.name for line in run.validations if line.score is not None]
    scores = [line.score for line in run.validations if names and line.name == names[0]]
    known = [score for score in scores if score is not None]
    before = known[0] if known else None
    return before, known[-1] if len(known) > 1 else None


def trained_tokens(run: LoadedRun) -> float:
    """Tokens of all trained responses, counted from the samples."""
    return float(sum(length * count for length, count in run.all_lengths.items()))


def _first_and_last_tenth(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Means of the first and last tenth of steps, at least one step each."""
    size = math.ceil(len(values) / 10)
    return mean_of(values[:size]), mean_of(values[len(values) - size :])


def _deferrals(run: LoadedRun) -> int | None:
    """How often a draw was deferred, over the whole run."""
    total = run.last_of("tail/deferrals_total")
    return _whole(run.sum_of("tail/deferred_groups") if total is None else total)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
