"""A comparison: ratios are run / baseline, and every unfairness has its note."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from outputs_example_run import RUN_ID, ExampleRun
from rich.console import Console

from rollpacker.types import StepRecord
from services.coordinator.outputs import (
    RunDirectoryError,
    RunOutputs,
    compare_runs,
    comparison_table,
)


def _same(record: StepRecord) -> StepRecord:
    return record


def _write(
    directory: Path,
    steps: int = 12,
    change: Callable[[StepRecord], StepRecord] = _same,
    levels: int = 0,
) -> Path:
    outputs = RunOutputs(directory, RUN_ID, "exact" if levels else "synchronous", {})
    for record, groups in ExampleRun(seed=8, levels=levels).steps(steps):
        outputs.write_step(change(record), groups)
    return directory


def _twice_as_slow(record: StepRecord) -> StepRecord:
    metrics = {name: record.metrics[name] * 2 for name in ("timing_s/step", "timing_s/rollout")}
    return replace(record, metrics={**record.metrics, **metrics})


def test_ratios_are_run_over_baseline(tmp_path: Path) -> None:
    run, baseline = _write(tmp_path / "a"), _write(tmp_path / "b", change=_twice_as_slow)
    assert compare_runs(run, baseline)["ratios"] == {
        "step_seconds_mean": pytest.approx(0.5),
        "rollout_seconds_mean": pytest.approx(0.5),
        "trained_tokens_per_second": pytest.approx(2.0),
        "wall_seconds": pytest.approx(1.0),
        "response_tokens_mean": pytest.approx(1.0),
    }


def test_equal_runs_have_no_note_but_the_direction(tmp_path: Path) -> None:
    run, baseline = _write(tmp_path / "a"), _write(tmp_path / "b")
    assert compare_runs(run, baseline)["notes"] == ["Ratios are run / baseline."]


def test_wall_times_of_unequal_work_have_no_ratio(tmp_path: Path) -> None:
    comparison = compare_runs(_write(tmp_path / "a", 20), _write(tmp_path / "b", 12))
    assert comparison["ratios"]["wall_seconds"] is None
    assert any("cover 20 and 12 steps" in note for note in comparison["notes"])


def test_short_runs_queues_and_other_lengths_are_noted(tmp_path: Path) -> None:
    comparison = compare_runs(_write(tmp_path / "a", 3, levels=2), _write(tmp_path / "b", 3))
    notes = " ".join(comparison["notes"])
    assert "Fewer than ten steps" in notes
    assert "draws in the queue" in notes
    assert "as long as the baseline's" in notes


def test_time_between_steps_is_noted(tmp_path: Path) -> None:
    def pause(record: StepRecord) -> StepRecord:
        shift = 60.0 if record.step >= 6 else 0.0
        return replace(
            record,
            start_time=record.start_time + shift,
            rollout_end_time=record.rollout_end_time + shift,
            end_time=record.end_time + shift,
        )

    comparison = compare_runs(_write(tmp_path / "a", change=pause), _write(tmp_path / "b"))
    assert comparison["run"]["outside_steps_seconds"] == pytest.approx(60, abs=0.1)
    assert any("lies between steps" in note for note in comparison["notes"])


def test_a_run_without_steps_compares_to_missing_figures(tmp_path: Path) -> None:
    comparison = compare_runs(_write(tmp_path / "a", 0), _write(tmp_path / "b", 2))
    assert set(comparison["ratios"].values()) == {None}


def test_the_table_shows_figures_ratios_and_notes(tmp_path: Path) -> None:
    run, baseline = _write(tmp_path / "a"), _write(tmp_path / "b", change=_twice_as_slow)
    screen = io.StringIO()
    Console(file=screen, width=120).print(comparison_table(compare_runs(run, baseline)))
    printed = screen.getvalue()
    for words in ("step time, mean", "0.50×", "2.00×", "Ratios are run / baseline."):
        assert words in printed


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="give runs/<run_id>"):
        compare_runs(_write(tmp_path / "a", 1), tmp_path / "missing")
