"""The regret table: what it divides by what."""

from __future__ import annotations

import pytest

from rollpacker.simulation.__main__ import main
from rollpacker.simulation.parameters import load_parameters
from rollpacker.simulation.regret import FIXED, RegretScenario, regret_rows, summary_row


def test_regret_of_more_seeds_is_that_of_the_means() -> None:
    parameters, scenario = load_parameters(), RegretScenario(8192, 0.6, seed=3)
    other = RegretScenario(8192, 0.6, seed=1003)
    (both,) = regret_rows(parameters, 1, [scenario], seeds=2)
    one, two = regret_rows(parameters, 1, [scenario, other])
    assert len(both["fixed"]) == len(FIXED)
    assert both["regrets"] == [one["regret"], two["regret"]]
    assert abs(both["auto"] - (one["auto"] + two["auto"]) / 2) < 0.01
    best = both["fixed"][both["best"]]
    assert best == min(both["fixed"].values())
    assert abs(both["regret"] - (both["auto"] / best - 1.0)) < 1e-3
    summary = summary_row([one, two])
    assert summary["largest_regret"] == max(one["regret"], two["regret"])
    assert summary["share_within_3_percent"] == sum(r["regret"] <= 0.03 for r in (one, two)) / 2


@pytest.mark.parametrize("argument", ["--seeds=0", "--steps=-1", "--seeds=two"])
def test_a_number_of_runs_that_makes_no_sense_is_refused(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["regret", argument])
    name, value = argument.split("=")
    assert f"argument {name}: '{value}' is not a number from 1" in capsys.readouterr().err
