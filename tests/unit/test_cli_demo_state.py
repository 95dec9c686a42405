"""When a demo is resumed, and when it is moved aside."""

from __future__ import annotations

from pathlib import Path

from rollpacker.cli.demo_state import DemoState

SETTINGS = {"demo": {"seed": 0}, "demo-synchronous": {"seed": 0}}
BOTH = list(SETTINGS)


def leave_outputs(runs: Path) -> None:
    (runs / "demo").mkdir(parents=True, exist_ok=True)
    (runs / "demo" / "metrics.jsonl").write_text("1")


def names(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.iterdir())


def test_the_first_demo_is_new(tmp_path: Path) -> None:
    assert DemoState(tmp_path, SETTINGS).open(BOTH) == "a new demo"
    assert names(tmp_path) == [".demo"]


def test_an_interrupted_demo_is_resumed(tmp_path: Path) -> None:
    DemoState(tmp_path, SETTINGS).open(BOTH)
    leave_outputs(tmp_path)
    again = DemoState(tmp_path, SETTINGS)
    assert again.open(BOTH).startswith("resuming")
    again.finish("demo")
    assert DemoState(tmp_path, SETTINGS).open(BOTH).startswith("resuming")
    assert names(tmp_path) == [".demo", "demo"]


def test_a_finished_demo_is_moved_aside_and_never_over_an_older_one(tmp_path: Path) -> None:
    for _ in range(3):
        state = DemoState(tmp_path, SETTINGS)
        state.open(BOTH)
        leave_outputs(tmp_path)
        state.finish("demo")
        state.finish("demo-synchronous")
    assert names(tmp_path) == [".demo", ".demo.1", ".demo.2", "demo", "demo.1", "demo.2"]


def test_a_call_for_one_run_goes_on_beside_the_other_that_finished(tmp_path: Path) -> None:
    state = DemoState(tmp_path, SETTINGS)
    state.open(["demo"])
    state.finish("demo")
    assert DemoState(tmp_path, SETTINGS).open(["demo-synchronous"]).startswith("resuming")
    assert "moved" in DemoState(tmp_path, SETTINGS).open(["demo"])


def test_a_demo_with_other_settings_is_moved_aside(tmp_path: Path) -> None:
    DemoState(tmp_path, SETTINGS).open(BOTH)
    leave_outputs(tmp_path)
    other = DemoState(tmp_path, {"demo": {"seed": 1}, "demo-synchronous": {"seed": 1}})
    assert other.open(BOTH) == f"a new demo; a demo with other settings was moved to {tmp_path}/*.1"
    assert names(tmp_path) == [".demo", ".demo.1", "demo.1"]


def test_outputs_of_an_unknown_demo_are_moved_aside(tmp_path: Path) -> None:
    leave_outputs(tmp_path)
    assert "moved" in DemoState(tmp_path, SETTINGS).open(BOTH)
    assert names(tmp_path) == [".demo", "demo.1"]
