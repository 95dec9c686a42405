"""What is trained, counted by what selected it, is as long as what nobody selects."""

from __future__ import annotations

import dataclasses

import pytest

from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.simulation.scenario import (
    FROZEN,
    MEASURED,
    PAPER,
    Drift,
    Scenario,
    TokenDrift,
    ladder,
)
from rollpacker.simulation.selection import weighed, weighed_groups
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.workload import Workload, WorkloadRules

PARAMETERS = load_parameters()
MODEL = dataclasses.replace(MODELS["7B"], gpus=16)
STEPS, PROMPTS, RESPONSES = 24, 32, 8
CAP = 8192


def run(
    drift: Drift | TokenDrift, *factors: float, seed: int = 0, paper: bool = False
) -> tuple[list[StepTrace], float]:
    """The steps, and the mean length of what nobody selects."""
    rules = PAPER if paper else ladder(*factors)
    rules = dataclasses.replace(rules, prompts_per_step=PROMPTS, responses_per_prompt=RESPONSES)
    lengths = WorkloadRules(CAP, 0.3, 0.02, seed=seed)
    scenario = Scenario(MODEL, lengths, rules, drift, steps=STEPS, scores=False)
    workload = Workload(lengths, STEPS * PROMPTS)
    steps = list(Simulator(scenario, PARAMETERS, workload).steps())
    return steps, float(workload.first_lengths[:, :RESPONSES].mean())


@pytest.mark.parametrize("factors", [(1.25,), (2.0, 2.0)])
@pytest.mark.parametrize("drift", [MEASURED, TokenDrift(1e-4), TokenDrift(3e-3)])
def test_weighed_lengths_are_nearer_to_those_that_nobody_selects(
    drift: Drift | TokenDrift, factors: tuple[float, ...]
) -> None:
    plain = weighed_mean = wanted = 0.0
    for seed in range(6):
        steps, mean = run(drift, *factors, seed=seed)
        plain += sum(s.trained_tokens for s in steps) / (STEPS * PROMPTS * RESPONSES)
        weighed_mean += weighed(steps).mean_length
        wanted += mean
    assert plain < 0.985 * wanted
    assert abs(weighed_mean / wanted - 1.0) < 0.65 * abs(plain / wanted - 1.0)


def test_every_trained_group_has_its_weight_and_only_deferred_ones_another_than_1() -> None:
    steps, _ = run(MEASURED, 2.0, 2.0)
    groups = list(weighed_groups(steps))
    assert [group.draw for group in groups] == [draw for step in steps for draw in step.trained]
    ages = [age for step in steps for age in step.ages]
    at_once = [group.weight for group, age in zip(groups, ages, strict=True) if age == 0]
    assert set(at_once) == {1.0}
    deferred = [group.weight for group, age in zip(groups, ages, strict=True) if age > 0]
    assert 0.0 in deferred
    assert max(deferred) > 1.0
    found = weighed(steps)
    assert found.zero_weight_share == deferred.count(0.0) / len(groups)
    assert 0.5 < found.effective_share < 1.0


def test_weights_that_do_not_move_weigh_nothing() -> None:
    steps, _ = run(FROZEN, 2.0, 2.0)
    assert {group.weight for group in weighed_groups(steps)} == {1.0}


def test_a_group_that_lost_at_the_cap_by_its_place_counts() -> None:
    """Races that end at the cap: a group with as many tokens cannot have turned short."""
    steps, _ = run(MEASURED, 2.0, 2.0, 2.0, 2.0, 2.0)
    cuts = [cut for step in steps if step.round.finish for cut in step.round.finish.cuts]
    assert CAP - 1 in cuts
    assert max(cuts) == CAP - 1
    weights = [g.weight for g in weighed_groups(steps) if max(g.lengths) == CAP]
    assert weights
    assert min(weights) >= 1.0


def test_a_race_by_arrival_says_nothing_of_lengths() -> None:
    steps, _ = run(MEASURED, paper=True)
    assert {group.weight for group in weighed_groups(steps)} == {1.0}
