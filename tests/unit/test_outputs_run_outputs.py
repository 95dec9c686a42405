"""RunOutputs: a repeat replaces, a rewind supersedes, a resume goes on; nothing ever doubles."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outputs_example_run import RUN_ID, ExampleRun, GroupsOfStep

from rollpacker.observability.metric_names import with_aliases
from services.coordinator.outputs import RunDirectoryError, RunOutputs, read_step_samples


@pytest.fixture(scope="module")
def steps() -> Sequence[GroupsOfStep]:
    return list(ExampleRun(seed=1).steps(6))


def _open(directory: Path) -> RunOutputs:
    return RunOutputs(directory, RUN_ID, "exact", {"seed": 1})


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _metric_steps(directory: Path) -> list[int]:
    return [line["step"] for line in _lines(directory / "metrics.jsonl")]


def _sampled(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "samples").iterdir())


def test_a_step_leaves_its_line_and_its_samples(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps:
        outputs.write_step(record, groups)
    assert _metric_steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert _sampled(tmp_path) == [f"step_{step:06d}.jsonl" for step in range(6)]
    for record, groups in steps:
        assert read_step_samples(tmp_path, record.step) == groups


def test_a_line_holds_the_record_and_its_metrics(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    record, groups = steps[0]
    _open(tmp_path).write_step(record, groups)
    assert _lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 0,
            "round_kind": "short",
            "level": 0,
            "start_time": record.start_time,
            "rollout_end_time": record.rollout_end_time,
            "end_time": record.end_time,
            "weight_version": 1,
            "trained_groups": len(groups),
            **with_aliases(record.metrics),
        }
    ]


def test_a_repeat_replaces(tmp_path: Path, steps: Sequence[GroupsOfStep]) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps:
        outputs.write_step(record, groups)
    record, groups = steps[-1]
    again = replace(record, metrics={"reward/mean": 0.5})
    outputs.write_step(again, groups)
    assert _metric_steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert _lines(tmp_path / "metrics.jsonl")[-1]["reward/mean"] == 0.5
    assert not (tmp_path / "superseded").exists()


def test_a_resumed_process_may_repeat_the_newest_step(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps[:3]:
        outputs.write_step(record, groups)
    resumed = _open(tmp_path)
    for record, groups in steps[2:]:
        resumed.write_step(record, groups)
    assert _metric_steps(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_samples_without_a_line_are_written_again(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    """A crash between the samples and the line of a step."""
    (record, groups), (_, others) = steps[:2]
    outputs = _open(tmp_path)
    outputs.write_step(record, groups)
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"round')
    _open(tmp_path).write_step(record, groups)
    assert _metric_steps(tmp_path) == [0]
    assert read_step_samples(tmp_path, 0) == groups


def test_a_rewind_supersedes_what_it_takes_back(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps:
        outputs.write_step(record, groups)
    for version in (0, 3, 4, 6):
        outputs.write_validation(version, "held_out", {"accuracy": 0.1})
    outputs.supersede_from(3)
    outputs.supersede_from(3)
    assert _metric_steps(tmp_path) == [0, 1, 2]
    assert _sampled(tmp_path) == [f"step_{step:06d}.jsonl" for step in range(3)]
    assert read_step_samples(tmp_path, 3) is None
    gone = tmp_path / "superseded"
    assert [line["step"] for line in _lines(gone / "metrics.jsonl")] == [3, 4, 5]
    assert [line["step"] for line in _lines(gone / "validation.jsonl")] == [4, 6]
    assert outputs.has_validation(3, "held_out")
    assert not outputs.has_validation(4, "held_out")


def test_a_step_written_after_a_rewind_supersedes_later_ones(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps:
        outputs.write_step(record, groups)
    outputs.write_step(*steps[2])
    assert _metric_steps(tmp_path) == [0, 1, 2]
    assert _sampled(tmp_path) == [f"step_{step:06d}.jsonl" for step in range(3)]
    outputs.write_step(*steps[3])
    assert _metric_steps(tmp_path) == [0, 1, 2, 3]


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    _open(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds run 'example', not 'other'; move it aside"):
        RunOutputs(tmp_path, "other", "exact", {})


def test_groups_that_are_not_those_of_the_record_are_refused(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    record, groups = steps[0]
    with pytest.raises(ValueError, match="in the order of the record"):
        outputs.write_step(record, groups[::-1])
    with pytest.raises(ValueError, match="belongs to step 7 of run 'example'"):
        outputs.write_step(record, [replace(group, step=7) for group in groups])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_metric_named_like_a_fixed_field_is_refused(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    record, groups = steps[0]
    with pytest.raises(ValueError, match=r"\['level'\] are fixed fields"):
        _open(tmp_path).write_step(replace(record, metrics={"level": 1.0}), groups)


def test_a_metric_that_is_not_finite_is_null(tmp_path: Path, steps: Sequence[GroupsOfStep]) -> None:
    record, groups = steps[0]
    outputs = _open(tmp_path)
    outputs.write_step(replace(record, metrics={"trainer/loss": float("nan")}), groups)
    assert _lines(tmp_path / "metrics.jsonl")[0]["trainer/loss"] is None
    assert outputs.finish()["steps"] == 1


def test_a_repeated_measurement_replaces_and_lines_stay_in_order(tmp_path: Path) -> None:
    outputs = _open(tmp_path)
    for step, name, accuracy in [(0, "a", 0.1), (5, "a", 0.2), (0, "b", 0.3), (0, "a", 0.4)]:
        outputs.write_validation(step, name, {"accuracy": accuracy})
    found = [
        (line["step"], line["name"], line["values"]["accuracy"])
        for line in _lines(tmp_path / "validation.jsonl")
    ]
    assert sorted(found) == [(0, "a", 0.4), (0, "b", 0.3), (5, "a", 0.2)]
    assert [step for step, _, _ in found] == [0, 0, 5]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a" * 65, ".hidden"])
def test_a_set_name_that_is_no_directory_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name: "):
        _open(tmp_path).write_validation(0, name, {})


def test_finish_works_on_a_run_without_a_step(tmp_path: Path) -> None:
    summary = _open(tmp_path).finish()
    assert (summary["steps"], summary["weight_version"], summary["reward_last"]) == (0, 0, None)
    assert "no step committed yet" in (tmp_path / "report.html").read_text()


def test_derived_files_can_be_made_again_from_the_others(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    outputs = _open(tmp_path)
    for record, groups in steps:
        outputs.write_step(record, groups)
    outputs.finish()
    derived = ["summary.json", "report.html", "trace.json"]
    before = {name: (tmp_path / name).read_text() for name in derived}
    for name in derived:
        (tmp_path / name).unlink()
    command = [sys.executable, "-m", "services.coordinator.outputs", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(tmp_path / "report.html")
    assert {name: (tmp_path / name).read_text() for name in derived} == before


def test_the_command_names_a_directory_that_is_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.coordinator.outputs", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{tmp_path}/run.json is missing")


def test_outputs_import_no_torch() -> None:
    code = "import sys, services.coordinator.outputs; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_what_another_run_of_the_same_id_left_is_superseded(
    tmp_path: Path, steps: Sequence[GroupsOfStep]
) -> None:
    before = _open(tmp_path)
    before.begin(100.0)
    before.write_step(*steps[0])
    before.write_validation(0, "held_out", {"accuracy": 0.5})
    again = _open(tmp_path)
    again.begin(100.0)
    assert again.has_validation(0, "held_out")
    assert _sampled(tmp_path) == ["step_000000.jsonl"]
    other = _open(tmp_path)
    other.begin(200.0)
    assert not other.has_validation(0, "held_out")
    assert (_metric_steps(tmp_path), _sampled(tmp_path)) == ([], [])
    assert (tmp_path / "superseded" / "step_000000.jsonl").exists()
