"""Scheduling ideas change when and where responses run, never what the policy promises."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.simulation.scenario import MEASURED, PAPER, Scenario, ladder
from rollpacker.simulation.search import IDEAS, search_rows
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.workload import WorkloadRules

PARAMETERS = load_parameters()
MODEL = dataclasses.replace(MODELS["7B"], gpus=4)
BY_NAME = {idea.name: idea for idea in IDEAS}
# They train other responses.
BIASED = ("small_groups", "first_8_of_10", "redraw_once", "redraw_twice")
SAME_WINNERS = [name for name in BY_NAME if name not in (*BIASED, "fill_in")]


def scenario(*, paper: bool = False) -> Scenario:
    rules = dataclasses.replace(
        PAPER if paper else ladder(1.75, 2.0), prompts_per_step=8, responses_per_prompt=4
    )
    return Scenario(MODEL, WorkloadRules(4096, 0.6, 0.03), rules, MEASURED, steps=8)


def run(name: str) -> list[StepTrace]:
    return list(Simulator(BY_NAME[name].change(scenario()), PARAMETERS).steps())


@pytest.mark.parametrize("name", BY_NAME)
def test_over_a_drained_epoch_every_draw_is_trained_once_with_every_idea(name: str) -> None:
    steps = run(name)
    trained = Counter(draw.prompt_id for step in steps for draw in step.trained)
    changed = BY_NAME[name].change(scenario())
    assert trained == Counter(map(str, range(8 * changed.rules.prompts_per_step)))
    for step in steps:
        assert step.trained_tokens <= step.decoded_tokens or name == "fill_in"


@pytest.mark.parametrize("name", SAME_WINNERS)
def test_ideas_about_placement_train_the_groups_of_today_in_their_steps(name: str) -> None:
    base, steps = run("base"), run(name)
    assert [step.trained for step in steps] == [step.trained for step in base]
    assert [step.trained_tokens for step in steps] == [step.trained_tokens for step in base]


def test_what_replicas_decode_is_what_the_round_counts_when_groups_are_taken_over() -> None:
    for step in run("rebalance_then_train"):
        assert step.round.finish is not None
        assert step.round.finish.generated_tokens == step.decoded_tokens


def test_taking_groups_over_shortens_rounds_and_idle_replicas_train_for_nothing() -> None:
    """At the paper's size, where prompts decide the lengths."""
    names = ("rebalance", "idle_replicas_train")
    rows = list(search_rows(PARAMETERS, (32768,), (0.9,), steps=6, names=names))
    rollout = {(row["base"], row["idea"]): row["rollout_speedup"] for row in rows}
    step = {(row["base"], row["idea"]): row["step_speedup"] for row in rows}
    for base in ("exact", "paper"):
        assert rollout[base, "rebalance"] > 1.05
        assert rollout[base, "idle_replicas_train"] == 1.0
        assert step[base, "idle_replicas_train"] > 1.01


def test_the_report_has_a_row_per_base_and_idea() -> None:
    rows = list(search_rows(PARAMETERS, (8192,), (0.6,), steps=3, names=("rebalance", "fill_in")))
    assert [(row["base"], row["idea"]) for row in rows] == [
        ("exact", "base"),
        ("exact", "rebalance"),
        ("exact", "fill_in"),
        ("paper", "base"),
        ("paper", "rebalance"),
    ]
    assert all(row["rollout_speedup"] == 1.0 for row in rows if row["idea"] == "base")
