"""summary.json: every figure is what its definition says, and a missing metric is null."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs_example_run import RUN_ID, ExampleRun

from rollpacker.types import StepRecord
from services.coordinator.outputs import RunOutputs
from services.coordinator.outputs.loaded_run import percentile

KEYS = [
    "mode",
    "steps",
    "reward_first",
    "reward_last",
    "validation_before",
    "validation_after",
    "step_seconds_mean",
    "rollout_seconds_mean",
    "trained_tokens_per_second",
    "response_tokens",
    "trained_groups",
    "deferrals",
    "undrained",
    "waste",
    "bias_ratio",
    "weight_version",
]


def _finished(directory: Path, metrics_of: Any, count: int = 20) -> dict[str, Any]:
    outputs = RunOutputs(directory, RUN_ID, "exact", {})
    for record, groups in ExampleRun(seed=2).steps(count):
        outputs.write_step(replace(record, metrics=metrics_of(record)), groups)
    return outputs.finish()


def _all(record: StepRecord) -> Any:
    return record.metrics


def test_the_keys_are_those_of_the_interface(tmp_path: Path) -> None:
    summary = _finished(tmp_path, _all)
    assert list(summary) == KEYS
    assert list(summary["response_tokens"]) == ["p50", "p75", "p99", "max"]


def test_rewards_are_means_of_the_first_and_last_tenth(tmp_path: Path) -> None:
    summary = _finished(tmp_path, lambda record: {"reward/mean": float(record.step)}, count=25)
    assert (summary["reward_first"], summary["reward_last"]) == (1.0, 23.0)  # three steps each


def test_token_figures_are_counted_from_the_samples(tmp_path: Path) -> None:
    played = list(ExampleRun(seed=2).steps(20))
    lengths = sorted(
        len(one.response.token_ids)
        for _, groups in played
        for group in groups
        for one in group.responses
    )
    seconds = sum(record.metrics["timing_s/step"] for record, _ in played)
    summary = _finished(tmp_path, _all)
    assert summary["trained_tokens_per_second"] == pytest.approx(sum(lengths) / seconds)
    assert summary["response_tokens"]["max"] == lengths[-1]
    assert summary["response_tokens"]["p50"] == lengths[len(lengths) // 2 - 1]
    assert summary["trained_groups"] == sum(len(groups) for _, groups in played)
    assert summary["step_seconds_mean"] == pytest.approx(seconds / 20)


def test_totals_are_those_after_the_last_step(tmp_path: Path) -> None:
    last = list(ExampleRun(seed=2).steps(20))[-1][0]
    summary = _finished(tmp_path, _all)
    assert summary["deferrals"] == last.metrics["tail/deferrals_total"] > 0
    assert summary["undrained"] == last.metrics["tail/queue_length"]
    assert summary["waste"] == last.metrics["perf/waste"] > 1
    assert summary["bias_ratio"] == last.metrics["bias/ratio"]
    assert summary["weight_version"] == 20


def test_without_metrics_the_times_come_from_the_record_and_the_rest_is_null(
    tmp_path: Path,
) -> None:
    summary = _finished(tmp_path, lambda record: {})
    records = [record for record, _ in ExampleRun(seed=2).steps(20)]
    seconds = sum(record.end_time - record.start_time for record in records)
    assert summary["step_seconds_mean"] == pytest.approx(seconds / 20)
    assert summary["trained_tokens_per_second"] > 0
    for name in ("reward_first", "reward_last", "deferrals", "undrained", "waste", "bias_ratio"):
        assert summary[name] is None


def test_deferrals_of_steps_without_a_total_are_summed(tmp_path: Path) -> None:
    summary = _finished(tmp_path, lambda record: {"tail/deferred_groups": 2.0})
    assert summary["deferrals"] == 40


def test_validation_is_the_first_and_last_score_of_the_set_measured_first(tmp_path: Path) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", {})
    assert outputs.finish()["validation_before"] is None
    outputs.write_validation(0, "held_out", {"accuracy": 0.25, "count": 8})
    summary = outputs.finish()
    assert (summary["validation_before"], summary["validation_after"]) == (0.25, None)
    outputs.write_validation(3, "other", {"accuracy": 0.9})
    outputs.write_validation(2, "held_out", {"accuracy": 0.5})
    outputs.write_validation(4, "held_out", {"response_tokens": 40})
    summary = outputs.finish()
    assert (summary["validation_before"], summary["validation_after"]) == (0.25, 0.5)


def test_measurements_among_the_metrics_of_a_step_count_too(tmp_path: Path) -> None:
    summary = _finished(tmp_path, lambda record: {"validation/accuracy": record.step / 10}, count=3)
    assert (summary["validation_before"], summary["validation_after"]) == (0.0, 0.2)


@settings(deadline=None)
@given(
    values=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    share=st.sampled_from([0.01, 0.5, 0.75, 0.99, 1.0]),
)
def test_a_percentile_is_the_smallest_value_with_that_share_at_or_below(
    values: list[int], share: float
) -> None:
    counts = {value: values.count(value) for value in values}
    found = percentile(counts, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)
