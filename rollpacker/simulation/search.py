"""Scheduling ideas against what runs today: each is a function from a scenario to another.

All ideas of a cap and a correlation see the same prompts, lengths and noise. The bases are `exact`
(two levels, deferred responses drift as measured) and `paper`. Speed-ups are of seconds per trained
response over the whole drained run, so that steps of another size compare; a trained length below
the base's is a loss, whatever the speed. An idea that needs the seeds is not tried on `paper`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.simulation import schedule as schedules
from rollpacker.simulation.compare import model_for
from rollpacker.simulation.parameters import Parameters
from rollpacker.simulation.scenario import FRESH, MEASURED, PAPER, Scenario, ladder
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.workload import MEASURED_ACCEPTANCE, MIX, Workload, WorkloadRules, by_age

CAPS, RHOS = (8192, 16384, 32768), (0.3, 0.6, 0.9)
_ALL = schedules.TRAINING_IDLE.releases  # no limit
BASES = {"exact": (ladder(1.75, 2.0), MEASURED), "paper": (PAPER, FRESH)}


@dataclass(frozen=True, slots=True)
class Idea:
    """One way to schedule otherwise."""

    name: str
    change: Callable[[Scenario], Scenario]
    needs_seeds: bool = False


def _scheduled(scenario: Scenario, **fields: Any) -> Scenario:
    return dataclasses.replace(scenario, schedule=dataclasses.replace(scenario.schedule, **fields))


def _ruled(scenario: Scenario, **fields: Any) -> Scenario:
    return dataclasses.replace(scenario, rules=dataclasses.replace(scenario.rules, **fields))


def _small_groups(scenario: Scenario) -> Scenario:
    prompts, responses = scenario.rules.prompts_per_step, scenario.rules.responses_per_prompt
    return _ruled(scenario, prompts_per_step=2 * prompts, responses_per_prompt=responses // 2)


def _overlapped(scenario: Scenario, **fields: Any) -> Scenario:
    return dataclasses.replace(_scheduled(scenario, **fields), scales_down=True)


def _accepted_begun(age: int) -> float:
    return by_age(MEASURED_ACCEPTANCE, age)


def _predicted(predictor: schedules.Predictor) -> Callable[[Scenario], Scenario]:
    return partial(_scheduled, predictor=predictor)


IDEAS = (
    Idea("base", lambda scenario: scenario),
    Idea("long_first", _predicted(schedules.deferred_tokens)),
    Idea("predicted_by_earlier_epoch", _predicted(schedules.earlier_epoch)),
    Idea("predicted_by_prompt", _predicted(schedules.prompt_features)),
    Idea("predicted_perfectly", _predicted(schedules.true_lengths)),
    Idea("spread_groups", partial(_scheduled, spreads_groups=True)),
    Idea("rebalance", partial(_scheduled, rebalances=True)),
    Idea("complete_groups_first", partial(_scheduled, complete_first=True)),
    Idea("small_groups", _small_groups),
    Idea("first_8_of_10", partial(_ruled, response_speculation_factor=1.25), needs_seeds=True),
    Idea("redraw_once", partial(dataclasses.replace, redraws=1), needs_seeds=True),
    Idea("redraw_twice", partial(dataclasses.replace, redraws=2), needs_seeds=True),
    Idea("fill_in", partial(_scheduled, bubble_acceptance=_accepted_begun), needs_seeds=True),
    Idea("training_overlap", _overlapped),
    Idea("graded_scale_down", partial(_overlapped, releases=4)),
    Idea("idle_replicas_train", partial(_overlapped, releases=_ALL, releases_idle=True)),
    Idea(
        "rebalance_then_train",
        partial(_overlapped, rebalances=True, releases=_ALL, releases_idle=True),
    ),
)


def search_rows(
    parameters: Parameters,
    caps: tuple[int, ...] = CAPS,
    rhos: tuple[float, ...] = RHOS,
    steps: int = 40,
    names: tuple[str, ...] = (),
    seeds: int = 1,
) -> Iterator[dict[str, Any]]:
    """One row per cap, correlation, base and idea (all, or the named ones beside `base`).

    `seeds`: so many runs of each, with other lengths, count together: a few rounds say little.
    """
    ideas = [idea for idea in IDEAS if not names or idea.name in ("base", *names)]
    for cap in caps:
        for rho in rhos:
            rules = WorkloadRules(cap, rho, parameters["never_stop_share"], MIX)
            for base, (policy, drift) in BASES.items():
                scenario = Scenario(model_for(cap), rules, policy, drift, steps=steps)
                where = {"cap": cap, "rho": rho, "base": base}
                found = [i for i in ideas if policy.keeps_seeds or not i.needs_seeds]
                yield from _compared(parameters, where, scenario, found, seeds)


def _compared(
    parameters: Parameters,
    where: dict[str, Any],
    scenario: Scenario,
    ideas: list[Idea],
    seeds: int,
) -> Iterator[dict[str, Any]]:
    count = scenario.steps * scenario.rules.prompts_per_step
    workloads = [
        Workload(dataclasses.replace(scenario.workload, seed=seed), count) for seed in range(seeds)
    ]
    base: list[StepTrace] = []
    for idea in ideas:
        changed = idea.change(scenario)
        width = changed.rules.responses_per_prompt
        done: list[StepTrace] = []
        for workload in workloads:
            done += Simulator(changed, parameters, workload).steps()
        base = base or done
        uncensored = sum(int(workload.first_lengths[:, :width].sum()) for workload in workloads)
        yield where | {"idea": idea.name, **_measures(done, base, uncensored)}


def _measures(done: list[StepTrace], base: list[StepTrace], uncensored: int) -> dict[str, Any]:
    rollout, step = _per_response(done, "rollout_seconds"), _per_response(done, "step_seconds")
    trained = sum(s.trained_tokens for s in done)
    return {
        "rollout_speedup": round(_per_response(base, "rollout_seconds") / rollout, 3),
        "step_speedup": round(_per_response(base, "step_seconds") / step, 3),
        "trained_tokens_per_second": round(trained / sum(s.step_seconds for s in done), 1),
        "mean_length_ratio": round(trained / uncensored, 4),
        "waste": round(sum(s.decoded_tokens for s in done) / trained, 3),
        "gpu_idle_share": round(
            1 - sum(s.busy_seconds for s in done) / sum(s.step_seconds for s in done), 3
        ),
        "preemptions": sum(s.preemptions for s in done),
        "steps": len(done),
    }


def _per_response(steps: list[StepTrace], name: str) -> float:
    seconds: float = sum(getattr(step, name) for step in steps)
    return seconds / sum(step.trained_responses for step in steps)
