"""Which runs a demo makes of its run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.cli import demo
from rollpacker.cli.failures import CommandError
from rollpacker.settings import parse_run_settings

EXACT = parse_run_settings(
    {
        "model": "/m",
        "seed": 3,
        "data": {"path": "/d"},
        "tail_batching": {
            "mode": "exact",
            "prompts_per_step": 8,
            "speculation_factors": [1.5, 2.0],
            "deferral_levels": 2,
            "selection_weights": True,
        },
    }
)


def test_the_synchronous_run_differs_in_its_schedule_alone() -> None:
    synchronous = demo.as_synchronous(EXACT)
    rules = synchronous.tail_batching
    assert (rules.mode, rules.resolved_levels, rules.prompts_per_step) == ("synchronous", 0, 8)
    assert rules.resolved_speculation_factors == ()
    same = EXACT.model_copy(update={"tail_batching": rules})
    assert synchronous == same


@pytest.mark.parametrize(
    ("only", "runs"),
    [
        ("", ["demo", "demo-synchronous"]),
        ("demo", ["demo"]),
        ("demo-synchronous", ["demo-synchronous"]),
    ],
)
def test_both_runs_are_made_unless_one_is_named(only: str, runs: list[str]) -> None:
    assert demo.wanted_runs(only) == runs


def test_a_model_that_was_not_fetched_is_refused_with_what_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_REPOSITORY", tmp_path)
    run_file = tmp_path / "demo" / "smollm2" / "run.yaml"
    run_file.parent.mkdir(parents=True)
    run_file.touch()
    with pytest.raises(CommandError, match=r"model is missing; `make demo MODEL=smollm2`"):
        demo.run_file(demo.Model.SMOLLM2)
    (tmp_path / ".local" / "smollm2" / "model").mkdir(parents=True)
    assert demo.run_file(demo.Model.SMOLLM2) == run_file


def test_an_unknown_run_is_refused_by_name() -> None:
    with pytest.raises(CommandError, match="--only: paper is neither demo nor demo-synchronous"):
        demo.wanted_runs("paper")
