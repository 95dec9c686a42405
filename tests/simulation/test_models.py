"""Workload, reward and trainer models; the parameters and the report of the paper."""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest

from rollpacker.simulation.__main__ import main
from rollpacker.simulation.calibration import flat, nelder_mead
from rollpacker.simulation.paper import Value, enough_predicted
from rollpacker.simulation.parameters import MODELS, load_parameters, paper_figures
from rollpacker.simulation.reward_model import RewardModel
from rollpacker.simulation.scenario import TokenDrift
from rollpacker.simulation.trainer_model import TrainerModel
from rollpacker.simulation.workload import (
    MEASURED_COUPLING,
    LengthLaw,
    Workload,
    WorkloadRules,
    by_age,
)

PARAMETERS = load_parameters()


@pytest.mark.parametrize("task", ["math", "code", "judge"])
def test_lengths_have_the_quantiles_of_the_paper(task: str) -> None:
    row = paper_figures()["fig2a_response_length_quantiles_vec"][task]
    law = LengthLaw(task, 0.01)
    for share in (0.05, 0.25, 0.5, 0.75, 0.9, 0.95):
        tokens = law.quantile(np.array([share]))[0]
        assert tokens == pytest.approx(row[f"p{round(100 * share):02d}"])
    assert np.isinf(law.quantile(np.array([0.995]))[0])


def test_lengths_correlate_within_a_prompt_as_asked() -> None:
    def rank_correlation(rho: float) -> float:
        rules = WorkloadRules(32768, rho, 0.0, "math")
        ranks = Workload(rules, 4000).first_lengths[:, :2].argsort(axis=0).argsort(axis=0)
        return float(np.corrcoef(ranks.T)[0, 1])

    assert rank_correlation(0.0) == pytest.approx(0.0, abs=0.05)
    assert rank_correlation(0.6) == pytest.approx(0.58, abs=0.05)


def test_the_coupling_is_the_share_of_responses_that_stay_the_same() -> None:
    workload = Workload(WorkloadRules(32768, 0.0, 0.03, "math"), 2000)
    numbers = np.arange(2000)
    first = workload.first_lengths
    assert (workload.lengths_again(numbers, 1.0, 1) == first).all()
    same = (workload.lengths_again(numbers, 0.63, 1) == first).mean()
    assert same == pytest.approx(0.63, abs=0.02)
    again = workload.lengths_again(numbers, 0.63, 1)
    assert np.corrcoef(first.ravel(), again.ravel())[0, 1] == pytest.approx(0.63, abs=0.04)


def test_measured_tables_are_interpolated_and_constant_behind_their_end() -> None:
    assert by_age(MEASURED_COUPLING, 2) == pytest.approx(0.63)
    assert 0.56 < by_age(MEASURED_COUPLING, 3) < 0.63
    assert by_age(MEASURED_COUPLING, 100) == pytest.approx(0.41)


def test_lengths_can_grow_over_the_draws() -> None:
    grown = Workload(WorkloadRules(10**6, 0.3, 0.0, "math", length_growth=2.0), 100)
    plain = Workload(WorkloadRules(10**6, 0.3, 0.0, "math"), 100)
    assert (grown.first_lengths[-1] >= 2 * plain.first_lengths[-1]).all()
    assert (grown.first_lengths[0] == plain.first_lengths[0]).all()


def test_rewards_in_turn_take_longer_than_rewards_side_by_side() -> None:
    items = [(n, task, False) for n in range(50) for task in ("math", "code", "judge")]
    in_turn = RewardModel(PARAMETERS, 0, adaptive_timeouts=False).score_in_turn(0.0, items)
    model = RewardModel(PARAMETERS, 0, adaptive_timeouts=False)
    together = [model.score(0.0, n, task) for n, task, _ in items]
    assert max(s.at for s in in_turn) > max(s.at for s in together)


def test_the_adaptive_limit_cuts_programs_that_never_end() -> None:
    def last(adaptive: bool) -> float:
        model = RewardModel(PARAMETERS, 0, adaptive_timeouts=adaptive)
        scores = [model.score(10.0 * n, 7, "code").at - 10.0 * n for n in range(200)]
        return max(scores[100:])

    assert last(False) > 29.0
    assert last(True) < 4.0


def test_anchors_of_an_earlier_epoch_adapt_the_first_limit() -> None:
    def longest(knows_anchors: bool) -> float:
        model = RewardModel(PARAMETERS, 0, adaptive_timeouts=True, knows_anchors=knows_anchors)
        return max(model.score(100.0 * n, n, "code").at - 100.0 * n for n in range(100))

    assert longest(False) > 29.0
    assert longest(True) < 5.0


def test_nothing_is_run_for_a_response_that_was_cut_off() -> None:
    model = RewardModel(PARAMETERS, 0, adaptive_timeouts=False)
    scores = [model.score(100.0 * n, n, "code", is_cut=True) for n in range(50)]
    seconds = PARAMETERS["code_seconds"]
    assert [score.at - 100.0 * n for n, score in enumerate(scores)] == pytest.approx([seconds] * 50)
    assert {score.reward for score in scores} == {0.0}


def test_work_on_released_gpus_is_work_that_is_not_left_for_the_end() -> None:
    def finish(share: float, once: bool) -> float:
        trainer = TrainerModel(PARAMETERS, MODELS["7B"], 16, fetches_once=once)
        trainer.receive(0.0, 500_000)
        trainer.release(10.0, share)
        trainer.receive(20.0, 500_000)
        return trainer.finish(100.0)

    assert finish(0.5, False) < finish(0.5, True) < finish(0.0, False)


def test_every_parameter_has_a_unit_and_a_source_and_few_are_fitted() -> None:
    assert all(entry.unit and entry.source for entry in PARAMETERS.entries)
    assert len({entry.name for entry in PARAMETERS.entries}) == len(PARAMETERS.entries)
    assert 0 < len(PARAMETERS.fitted) <= 16


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(KeyError, match="no such parameter"):
        PARAMETERS.replace({"speed_of_light": 1.0})


def test_a_report_with_too_few_predictions_does_not_pass() -> None:
    values = [Value("table2", str(n), 1.0, 1.0) for n in range(3 * len(PARAMETERS.fitted))]
    assert enough_predicted(PARAMETERS, values)
    assert not enough_predicted(PARAMETERS, values[1:])
    assert not enough_predicted(PARAMETERS, [Value("fig11", "x", 1.0, 1.0)] * 1000)


def test_over_many_rounds_the_bars_of_fig11_are_as_near_as_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/evaluation.md; without the noise of the paper's forty rounds, or of ours."""
    assert main(["calibrate", "--json", "--evaluations", "0", "--rounds", "600"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["before"] == row["after"] for row in rows if "parameter" in row)
    errors = {row["key"]: abs(row["relative_error"]) for row in rows if "figure" in row}
    assert len(errors) == 24
    assert median(errors.values()) <= 0.08
    beyond = {key for key, error in errors.items() if error > 0.15}
    assert beyond == {"cap_8k.responses_only.1.5", "cap_16k.responses_only.1.5"}
    assert max(errors.values()) <= 0.28


def test_fixed_ladders_are_compared_in_place_of_the_modes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = ["--cap", "2048", "--rho", "0.3", "--steps", "4"]
    ladders = ["--ladder", "1.25", "--ladder", "1.5,2"]
    assert main(["compare", "--json", *scenario, *ladders]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    levels = {row["mode"]: row["levels"] for row in rows}
    assert list(levels) == [
        "synchronous",
        "overlap",
        "oracle",
        "paper",
        "exact 1.25",
        "exact 1.5,2",
    ]
    assert levels["exact 1.5,2"] > levels["exact 1.25"] > levels["synchronous"]


def test_fixed_ladders_have_engines_of_a_size_and_draw_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = ["--cap", "2048", "--rho", "0.3", "--steps", "4", "--ladder", "1.5,2"]
    rows = []
    for options in ([], ["--size", "2"], ["--redraws", "2"]):
        assert main(["compare", "--json", *scenario, *options]) == 0
        rows.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    usual, sized, again = rows
    assert (usual["sizes"], usual["redraws"]) == ("the paper's", 0)
    assert (sized["sizes"], sized["redraws"]) == ("2", 0)
    assert sized["rollout_seconds"] != usual["rollout_seconds"]
    assert sized["mean_length_ratio"] == usual["mean_length_ratio"]
    assert again["redraws"] == 2
    assert again["mean_length_ratio"] > usual["mean_length_ratio"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--size", "2"], "--size and --redraws are for fixed ladders: name one with --ladder"),
        (["--redraws", "1"], "--size and --redraws are for fixed ladders: name one with --ladder"),
        (["--ladder", "2", "--cap", "32768", "--size", "16"], "--size 16: engines of the model"),
    ],
)
def test_options_of_fixed_ladders_that_cannot_be_are_named(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *options]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("ladder", ["2.5", "1.5,x", ""])
def test_a_wrong_ladder_is_named(ladder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--ladder", ladder])
    assert f"{ladder!r} is not a ladder" in capsys.readouterr().err


def test_the_report_prints_one_json_object_per_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--json", "--figures", "fig13c"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["key"] for row in rows} == {
        f"{kind}_{limit}" for kind in ("short", "long") for limit in ("fixed", "adaptive")
    }
    for row in rows:
        assert row["relative_error"] == pytest.approx(row["ours"] / row["paper"] - 1, abs=1e-3)


def test_dotted_keys_are_the_ones_of_the_published_file() -> None:
    keys = flat(paper_figures()["fig11_rollout_seconds_full_period"])
    assert len(keys) == 24
    assert keys["cap_32k.prompts_only.1.25"] == 259


def test_the_simplex_search_finds_a_minimum() -> None:
    point, value = nelder_mead(lambda x: float(((x - [1.0, -2.0]) ** 2).sum()), [0, 0], 0.5, 200)
    assert point == pytest.approx([1.0, -2.0], abs=1e-3)
    assert value == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("changes_per_token", [1e-5, 1e-4, 1e-3])
def test_tokens_change_at_their_rate_and_the_law_of_lengths_stays(changes_per_token: float) -> None:
    count = 3000
    workload = Workload(WorkloadRules(16384, 0.3, 0.03, "math"), count)
    first = workload.first_lengths
    again = np.array([workload.lengths_changed(n, changes_per_token, 1) for n in range(count)])
    same = np.exp(-changes_per_token * first.astype(float)).mean()
    assert (again == first).mean() == pytest.approx(same, abs=0.02)
    assert np.log(again).mean() == pytest.approx(np.log(first).mean(), abs=0.02)
    assert (again == 16384).mean() == pytest.approx((first == 16384).mean(), abs=0.004)
    changed = again != first
    before = np.array([workload.first_changes(n, changes_per_token) for n in range(count)])
    assert (again[changed] > before[changed]).all()
    assert (first[changed] > before[changed]).all()


def test_what_changes_sooner_has_fewer_tokens_in_common() -> None:
    workload = Workload(WorkloadRules(16384, 0.3, 0.03, "math"), 20)
    for number in range(20):
        early, late = (workload.first_changes(number, rate) for rate in (1e-3, 1e-4))
        assert (early < late).all()
        assert workload.lengths_changed(number, 0.0, 1) == workload.lengths(number)
        tokens = [900] * 8
        kept = TokenDrift(1e-3).accepted(workload, number, 1, tokens)
        assert kept == [min(900, int(x)) for x in early[:8]]
        assert TokenDrift(1e-3, drafts=False).accepted(workload, number, 1, tokens) == [0] * 8
