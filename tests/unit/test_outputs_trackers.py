"""Trackers as the outputs use them; the real ones: `make test-trackers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollpacker.settings import RunSettings
from services.coordinator.outputs import RunOutputs
from services.coordinator.outputs.run_directory import RunDirectoryError
from services.coordinator.outputs.trackers import TrackedRun, Trackers
from tests.unit.outputs_example_run import RUN_ID, ExampleRun


class MemoryTracker:
    """A tracker that fulfils the protocol; keeps what it is told."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.told: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        assert not self.closed
        assert wall_time > 0
        self.told.append((step, scalars))

    def close(self) -> None:
        self.closed = True


def settings(*trackers: str) -> dict[str, Any]:
    values = RunSettings(model="/m", data={"path": "/d"}, tracking={"trackers": trackers})  # type: ignore[arg-type]
    return values.model_dump(mode="json")


def test_a_tracker_is_opened_by_a_write_closed_and_opened_again(tmp_path: Path) -> None:
    made: list[MemoryTracker] = []

    def make(run: TrackedRun) -> MemoryTracker:
        made.append(MemoryTracker(run))
        return made[-1]

    trackers = Trackers(TrackedRun("r", tmp_path, settings("wandb")), {"wandb": make})
    assert made == []
    trackers.write(0, 1.0, {"a": 1.0})
    trackers.write(1, 2.0, {"a": 2.0})
    trackers.close()
    trackers.close()
    trackers.write(1, 3.0, {"a": 3.0})
    assert [one.told for one in made] == [[(0, {"a": 1.0}), (1, {"a": 2.0})], [(1, {"a": 3.0})]]
    assert [one.closed for one in made] == [True, False]
    assert made[0].run.option("project") == "rollpacker"


class Unreachable(MemoryTracker):
    """A tracker whose server is away, from a call on."""

    failing = "open"

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._fail_at("open")

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        self._fail_at("write")
        super().write(step, wall_time, scalars)

    def close(self) -> None:
        self._fail_at("close")

    def _fail_at(self, call: str) -> None:
        if call == self.failing:
            raise RuntimeError(f"no server at {call}")


@pytest.mark.parametrize("call", ["open", "write", "close"])
def test_a_tracker_that_fails_is_warned_of_once_and_the_others_go_on(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unreachable, "failing", call)
    run = TrackedRun("r", tmp_path, settings("wandb", "mlflow"))
    good = MemoryTracker(run)
    trackers = Trackers(run, {"wandb": Unreachable, "mlflow": lambda _run: good})
    for step in range(3):
        trackers.write(step, 1.0, {"a": 1.0})
    trackers.close()
    assert [step for step, _ in good.told] == [0, 1, 2]
    assert good.closed
    (warning,) = caplog.messages
    assert warning.startswith("wandb failed; the run goes on without it:")
    assert f"no server at {call}" in warning


def test_a_run_writes_steps_and_measurements_to_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", settings())
    tracker = MemoryTracker(TrackedRun(RUN_ID, tmp_path, settings()))
    run = TrackedRun(RUN_ID, tmp_path, settings("mlflow"))
    monkeypatch.setattr(outputs, "_trackers", Trackers(run, {"mlflow": lambda _run: tracker}))
    record, groups = next(ExampleRun().steps(1))
    outputs.write_step(record, groups)
    outputs.write_validation(1, "held_out", {"accuracy": 0.5})
    outputs.finish()
    (step, metrics), measured = tracker.told
    assert (step, metrics["timing_s/gen"]) == (0, record.metrics["timing_s/rollout"])
    assert measured == (1, {"validation/held_out/accuracy": 0.5})
    assert tracker.closed


def test_a_tracker_that_is_not_installed_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(RunDirectoryError, match=r"tracking.trackers: wandb .* pip install"):
        RunOutputs(tmp_path, RUN_ID, "exact", settings("wandb"))
