"""A tensor-parallel size for each level: what the planner chooses, and what it is worth.

A run with the paper's size for all levels is simulated; from its first groups the planner chooses a
size for each level, and the same run is simulated again with these. Weights are frozen, so that
both train the same groups in the same rounds, and only their times differ. A resize takes no time
here: with k steps between two resizes it may take k times what a step gains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean
from typing import Any

from rollpacker.ladders import DEFAULT_FACTORS
from rollpacker.policy.group_law import ObservedGroup
from rollpacker.policy.ladder_forecast import EngineMeasure
from rollpacker.policy.planner import SizeChoice, choose_sizes
from rollpacker.simulation.compare import model_for
from rollpacker.simulation.engine_speed import engine_speed
from rollpacker.simulation.parameters import ModelFacts, Parameters
from rollpacker.simulation.scenario import FROZEN, Scenario, ladder
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.steering import planner_rules
from rollpacker.simulation.workload import Workload, WorkloadRules

SCENARIOS = tuple((cap, rho) for cap in (8192, 16384, 32768, 65536) for rho in (0.3, 0.6))
_SIZES = (1, 2, 4, 8)  # within one host
_FACTORS = DEFAULT_FACTORS["auto"]
_KNOWN_GROUPS = 1000  # from which the planner chooses


def size_rows(parameters: Parameters, steps: int) -> Iterator[dict[str, Any]]:
    """One row per scenario."""
    for cap, rho in SCENARIOS:
        rules = WorkloadRules(cap, rho, parameters["never_stop_share"])
        model, workload = model_for(cap), Workload(rules, steps * 128)
        scenario = Scenario(model, rules, ladder(*_FACTORS), FROZEN, steps=steps)
        choice = _chosen(parameters, scenario, workload)
        one = _steps(parameters, scenario, workload)
        own = _steps(parameters, dataclasses.replace(scenario, level_sizes=choice.sizes), workload)
        seconds, with_own = (fmean(s.rollout_seconds for s in done) for done in (one, own))
        yield {
            "cap": cap,
            "rho": rho,
            "one_size": model.tensor_parallel_size,
            "its_rollout_seconds": round(seconds, 2),
            "sizes": list(choice.sizes),
            "their_rollout_seconds": round(with_own, 2),
            "saved_share": round(1.0 - with_own / seconds, 4),
            "resizes_per_step": round(_resizes(own, choice.sizes), 3),
            "reason": choice.reason,
        }


def _chosen(parameters: Parameters, scenario: Scenario, workload: Workload) -> SizeChoice:
    known = workload.first_lengths[:_KNOWN_GROUPS, : scenario.rules.responses_per_prompt]
    groups = [ObservedGroup(tuple(row), complete=True) for row in known.tolist()]
    present = (scenario.model.tensor_parallel_size,) * (len(_FACTORS) + 1)
    rules = planner_rules(scenario.rules, scenario.workload.cap)
    return choose_sizes(rules, engines(parameters, scenario), groups, _FACTORS, present)


def engines(parameters: Parameters, scenario: Scenario) -> dict[int, EngineMeasure]:
    """The same GPUs at each size at which the model and one response fit."""
    found: dict[int, EngineMeasure] = {}
    for size in _SIZES:
        if not _fits(parameters, scenario.model, size):
            continue
        speed = engine_speed(parameters, scenario.model, size)
        found[size] = EngineMeasure(
            replicas=scenario.gpu_count // size,
            base_seconds=speed.base_seconds,
            per_sequence_seconds=speed.per_sequence_seconds,
            per_kv_token_seconds=speed.per_kv_token_seconds,
            kv_capacity=speed.kv_capacity,
            prompt_tokens=int(parameters["prompt_tokens"]),
            free_sequences=speed.free_sequences,
        )
    return found


def _fits(parameters: Parameters, model: ModelFacts, size: int) -> bool:
    try:
        engine_speed(parameters, model, size)
    except ValueError:
        return False
    return True


def _steps(parameters: Parameters, scenario: Scenario, workload: Workload) -> list[StepTrace]:
    return list(Simulator(scenario, parameters, workload).steps())


def _resizes(steps: list[StepTrace], sizes: tuple[int, ...]) -> float:
    """How often the next round has another size, per step."""
    of_steps = [sizes[step.level] for step in steps]
    return fmean(a != b for a, b in pairwise(of_steps))
