"""Modes against each other beyond the paper, with the parameters that were fitted to it.

All modes of a scenario see the same prompts, lengths and noise. A scenario is a cap (with the
model that the paper runs at it, 32B beyond 32k), a within-prompt correlation and a task; a mode is
a value of `TailBatchingRules`, or the planner.

`schedule` says what becomes of idle replicas, and in which order responses are scored: nothing, and
as they finish (`plain`: the same for all modes); they take groups over, and complete groups are
scored first (`rebalance`: what a live run in mode `auto` does unless told otherwise); or they train
as well where nothing is left to take over (`rebalance, idle`: with `scale_down_rule: idle`).

`sizes`: engines keep the paper's tensor-parallel size, or preemptions decide it (the paper's rule),
or mode `auto` plans it.

`coupling` says how a deferred response comes out: `measured` (the table in `workload`), `frozen`
(the same again), `fresh` (the paper's own rule), or so many changes a token and update
(`benchmarks/drift.py`). `carry_over` is the share of its tokens that need
no decoding. The oracle knows all lengths in advance: it runs the epoch in order of length, without
carry-over, so nothing is launched twice.

`mean_length_ratio` is the trained mean over that of the first launches, which only a simulation
knows; `bias_meter` is what a live run's meter reads in its place.

`weighed_length_ratio` is the trained mean of groups as they count by `selection` (`auto`: where it
weighs; `exact`: if it did), `zero_weight_share` those that count nothing, `effective_group_share`
how many equally counted ones would say as much. They are left out of the oracle, and beside
`redraws` (fixed ladders only).

`compare_recorded` does the same with the lengths of a real run (`recorded_lengths`), its P0 and R0,
and the coupling that it measured (`recorded`), on so many GPUs that each has as much to do.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

import numpy as np

from rollpacker.ladders import DEFAULT_FACTORS
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.simulation.engine_speed import sizes_that_fit
from rollpacker.simulation.parameters import MODELS, ModelFacts, Parameters
from rollpacker.simulation.recorded_lengths import RecordedLengths, ResampledWorkload
from rollpacker.simulation.scenario import (
    FRESH,
    FROZEN,
    MEASURED,
    MEASURED_CARRY_OVER,
    OVERLAP,
    PAPER,
    SYNCHRONOUS,
    Drift,
    Scenario,
    TokenDrift,
    carried,
    ladder,
)
from rollpacker.simulation.schedule import PLAIN, REBALANCED, TRAINING_IDLE
from rollpacker.simulation.selection import weighed
from rollpacker.simulation.simulator import Simulator, Steer, StepTrace
from rollpacker.simulation.steering import PlannedSteering, PreemptionSteering, planner_rules
from rollpacker.simulation.summary import length_bias
from rollpacker.simulation.workload import MIX, RecordedWorkload, Workload, WorkloadRules

DEFAULT_CAPS, DEFAULT_RHOS = (16384, 32768), (0.3, 0.6, 0.9)
FULL_CAPS = (8192, 16384, 32768, 65536, 131072)
FULL_RHOS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.9)
# Changes per token and update: the demo's model at learning rate 2e-6, SmolLM2-135M at 1e-6.
TINY_CHANGES, SMOLLM2_CHANGES = 1e-4, 3e-3
AUTO_START = DEFAULT_FACTORS["auto"]  # as a live run begins


@dataclass(frozen=True, slots=True)
class Mode:
    """One line of the comparison."""

    name: str
    rules: TailBatchingRules
    drift: Drift | TokenDrift
    coupling: str
    carry_over: str
    planned: bool = False
    schedule: str = "plain"
    sizes: str = "the paper's"
    redraws: int = 0  # see `redraws`


SCHEDULES = {"plain": PLAIN, "rebalance": REBALANCED, "rebalance, idle": TRAINING_IDLE}


def modes() -> tuple[Mode, ...]:
    """Every mode, the baseline first."""
    exact = {1: ladder(1.5), 2: ladder(1.75, 2.0), 3: ladder(2.0, 2.0, 2.0)}
    start = ladder(*AUTO_START)
    return (
        Mode("synchronous", SYNCHRONOUS, FROZEN, "frozen", "none"),
        Mode("overlap", OVERLAP, FROZEN, "frozen", "none"),
        Mode("paper", PAPER, FRESH, "fresh", "none"),
        *(Mode("exact", rules, MEASURED, "measured", "none") for rules in exact.values()),
        Mode("exact", exact[2], MEASURED_CARRY_OVER, "measured", "measured"),
        *(
            dataclasses.replace(mode, schedule=schedule)
            for mode in (
                Mode("auto", start, MEASURED, "measured", "none", planned=True),
                Mode("auto", start, MEASURED_CARRY_OVER, "measured", "measured", planned=True),
                Mode("auto", start, FROZEN, "frozen", "none", planned=True),
                Mode("auto", start, carried(0.5), "frozen", "0.5", planned=True),
                Mode("auto", start, carried(0.9), "frozen", "0.9", planned=True),
            )
            for schedule in SCHEDULES
            if schedule != "rebalance, idle" or mode.carry_over in ("none", "measured")
        ),
        Mode("paper", PAPER, FRESH, "fresh", "none", sizes="by preemptions"),
        *(
            dataclasses.replace(mode, schedule="rebalance, idle", planned=True, sizes="planned")
            for mode in (
                Mode("auto", start, MEASURED, "measured", "none"),
                Mode("auto", start, MEASURED_CARRY_OVER, "measured", "measured"),
                Mode("auto", start, FROZEN, "frozen", "none"),
            )
        ),
        *(
            dataclasses.replace(mode, drift=TokenDrift(rate), coupling=f"{rate:g} a token")
            for rate in (TINY_CHANGES, SMOLLM2_CHANGES)
            for mode in (
                Mode("exact", exact[2], FROZEN, "", "by token"),
                Mode("auto", start, FROZEN, "", "by token", True, "rebalance, idle"),
                Mode("auto", start, FROZEN, "", "by token", True, "rebalance, idle", "planned"),
            )
        ),
    )


def main_modes() -> tuple[Mode, ...]:
    """Without those that only say what drafts, idle replicas or planned sizes are worth."""
    return tuple(mode for mode in modes() if _is_main(mode))


def _is_main(mode: Mode) -> bool:
    if mode.name != "auto":
        return mode.sizes == "the paper's" and mode.carry_over != "by token"
    if mode.coupling == "measured" and mode.carry_over == "measured":
        return mode.schedule != "plain"  # as a live run may be
    if mode.carry_over == "by token":
        return mode.sizes == "the paper's"
    return mode.schedule == "plain"  # like for like


class SizeError(ValueError):
    """Engines of a tensor-parallel size cannot hold a model."""


@dataclass(frozen=True, slots=True)
class FixedLadders:
    """Ladders that are kept for the whole run, else as `auto` runs its own."""

    ladders: tuple[tuple[float, ...], ...]
    size: int = 0  # tensor-parallel size at all levels; 0: the paper's
    redraws: int = 0

    def modes(self) -> tuple[Mode, ...]:
        """The baselines, then one per ladder."""
        return *modes()[:3], *map(self._mode, self.ladders)

    def _mode(self, factors: tuple[float, ...]) -> Mode:
        rules = ladder(*factors)
        if self.size:
            rules = dataclasses.replace(rules, tensor_parallel_sizes=(self.size,))
        return Mode(
            f"exact {','.join(f'{factor:g}' for factor in factors)}",
            rules,
            MEASURED_CARRY_OVER,
            "measured",
            "measured",
            schedule="rebalance, idle",
            sizes=str(self.size or "the paper's"),
            redraws=self.redraws,
        )

    def check(self, parameters: Parameters, caps: Sequence[int]) -> None:
        """Raises SizeError where engines of this size cannot hold the model of a cap."""
        for cap in caps:
            sizes = sizes_that_fit(parameters, model_for(cap))
            if self.size and self.size not in sizes:
                raise SizeError(
                    f"--size {self.size}: engines of the model at cap {cap} have one of {sizes}"
                )


def model_for(cap: int) -> ModelFacts:
    """The model that the paper runs at this cap; 32B with a larger cap beyond."""
    for model in MODELS.values():
        if cap <= model.max_response_tokens:
            return dataclasses.replace(model, max_response_tokens=cap)
    return dataclasses.replace(MODELS["32B"], max_response_tokens=cap)


def compare(
    parameters: Parameters,
    caps: tuple[int, ...] = DEFAULT_CAPS,
    rhos: tuple[float, ...] = DEFAULT_RHOS,
    steps: int = 32,
    task: str = MIX,
    fixed: FixedLadders | None = None,
    *,
    every: bool = False,
) -> Iterator[dict[str, Any]]:
    """One row per scenario and mode; scenarios run in processes of their own, one per core.

    `fixed`: these instead of the modes; `every`: all modes, else the main ones. Raises SizeError.
    """
    if fixed is not None:
        fixed.check(parameters, caps)
    tried = fixed.modes() if fixed else modes() if every else main_modes()
    scenarios = [
        WorkloadRules(cap, rho, parameters["never_stop_share"], task)
        for cap in caps
        for rho in rhos
    ]
    count = min(len(scenarios), os.cpu_count() or 1)
    # Not forked: the caller may have threads.
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for rows in pool.map(partial(_drawn, parameters, steps, tried), scenarios):
            yield from rows


def _drawn(
    parameters: Parameters, steps: int, tried: tuple[Mode, ...], rules: WorkloadRules
) -> list[dict[str, Any]]:
    """All modes of a scenario."""
    workload = Workload(rules, steps * SYNCHRONOUS.prompts_per_step)
    return list(_scenario(parameters, workload, rules, steps, tried))


def compare_recorded(parameters: Parameters, recorded: RecordedLengths) -> Iterator[dict[str, Any]]:
    """One row per mode on the lengths of a run."""
    prompts, responses = recorded.prompts_per_step, recorded.responses_per_prompt
    rho = round(recorded.prompt_correlation, 3)
    rules = WorkloadRules(recorded.cap, rho, 0.0, "recorded")
    per_gpu = SYNCHRONOUS.prompts_per_step * SYNCHRONOUS.responses_per_prompt
    gpus = max(1, round(model_for(recorded.cap).gpus * prompts * responses / per_gpu))
    steps = max(1, len(recorded.rows) // prompts)
    usual = (mode for mode in modes() if isinstance(mode.drift, Drift))  # lengths are recorded
    found = tuple(_recorded_mode(mode, recorded) for mode in usual)
    yield from _scenario(parameters, recorded.workload(), rules, steps, found, gpus)


def _recorded_mode(mode: Mode, recorded: RecordedLengths) -> Mode:
    rules = dataclasses.replace(
        mode.rules,
        prompts_per_step=recorded.prompts_per_step,
        responses_per_prompt=recorded.responses_per_prompt,
    )
    if mode.coupling != "measured" or not recorded.coupling:
        return dataclasses.replace(mode, rules=rules)
    assert isinstance(mode.drift, Drift)
    drift = Drift(recorded.coupling_at, mode.drift.acceptance)
    return dataclasses.replace(mode, rules=rules, drift=drift, coupling="recorded")


def run_mode(
    parameters: Parameters,
    mode: Mode,
    workload: Workload | RecordedWorkload,
    rules: WorkloadRules,
    steps: int,
    gpus: int = 0,
) -> list[StepTrace]:
    """All steps of a mode on a workload; `gpus`: 0 for the paper's."""
    model = model_for(rules.cap)
    schedule = SCHEDULES[mode.schedule]
    start = mode.rules
    if mode.sizes == "planned":
        sizes = (model.tensor_parallel_size,) * (start.levels + 1)
        start = dataclasses.replace(start, tensor_parallel_sizes=sizes)
    scenario = Scenario(
        model,
        rules,
        start,
        mode.drift,
        steps=steps,
        gpus=gpus,
        scales_down=schedule.releases_idle,
        schedule=schedule,
        redraws=mode.redraws,
    )
    steering = _steering(parameters, scenario, mode)
    return list(Simulator(scenario, parameters, workload, steering).steps())


def _steering(parameters: Parameters, scenario: Scenario, mode: Mode) -> Steer | None:
    """Who changes the rules between steps."""
    smallest, largest = 1, 0
    if mode.sizes != "the paper's":
        sizes = sizes_that_fit(parameters, scenario.model)
        smallest, largest = sizes[0], sizes[-1]
    if mode.sizes == "by preemptions":
        return PreemptionSteering(scenario.model.tensor_parallel_size, largest)
    if mode.planned:
        return PlannedSteering(planner_rules(mode.rules, scenario.workload.cap, smallest, largest))
    return None


def _scenario(
    parameters: Parameters,
    workload: Workload | ResampledWorkload,
    rules: WorkloadRules,
    steps: int,
    tried: tuple[Mode, ...],
    gpus: int = 0,
) -> Iterator[dict[str, Any]]:
    width = tried[0].rules.responses_per_prompt
    uncensored = int(workload.first_lengths[:, :width].sum())
    base: list[StepTrace] = []
    where = {"cap": rules.cap, "rho": rules.prompt_correlation, "task": rules.task}
    for mode in tried:
        done = run_mode(parameters, mode, workload, rules, steps, gpus)
        base = base or done
        if mode.name == "paper" and mode.sizes == "the paper's":
            overlap = dataclasses.replace(tried[1], name="oracle")
            yield where | _oracle(parameters, overlap, workload, rules, steps, base, gpus)
        yield where | {
            "mode": mode.name,
            "levels": max(step.level for step in done),
            "coupling": mode.coupling,
            "carry_over": mode.carry_over,
            "schedule": mode.schedule,
            "sizes": mode.sizes,
            "redraws": mode.redraws,
            **_measures(done, base, uncensored),
            **_weighed(done, mode, uncensored / (width * len(workload.first_lengths))),
        }


def _weighed(done: list[StepTrace], mode: Mode, mean_length: float) -> dict[str, float]:
    """With groups counted by what selected them; see `selection`. Not beside redraws, which are
    another answer to the same."""
    if mode.redraws:
        return {}
    found = weighed(done, always=not mode.planned)
    return {
        "weighed_length_ratio": round(found.mean_length / mean_length, 4),
        "zero_weight_share": round(found.zero_weight_share, 4),
        "effective_group_share": round(found.effective_share, 4),
    }


def _oracle(
    parameters: Parameters,
    mode: Mode,
    workload: Workload | ResampledWorkload,
    rules: WorkloadRules,
    steps: int,
    base: list[StepTrace],
    gpus: int,
) -> dict[str, Any]:
    lengths = workload.first_lengths[:, : mode.rules.responses_per_prompt]
    order = np.argsort(lengths.max(axis=1), kind="stable")
    known = RecordedWorkload(lengths[order].tolist())
    done = run_mode(parameters, mode, known, rules, steps, gpus)
    return {
        "mode": "oracle",
        "levels": 0,
        "coupling": "frozen",
        "carry_over": "none",
        "schedule": "plain",
        "sizes": mode.sizes,
        "redraws": mode.redraws,
        **_measures(done, base, int(lengths.sum())),
    }


def _measures(done: list[StepTrace], base: list[StepTrace], uncensored: int) -> dict[str, Any]:
    rollout, step = _rollout(done), _step(done)
    trained = sum(s.trained_tokens for s in done)
    return {
        "step_seconds": round(step, 2),
        "rollout_seconds": round(rollout, 2),
        "rollout_speedup_over_synchronous": round(_rollout(base) / rollout, 3),
        "step_speedup_over_synchronous": round(_step(base) / step, 3),
        "trained_tokens_per_second": round(trained / (step * len(done)), 1),
        "trained_tokens_per_rollout_second": round(trained / (rollout * len(done)), 1),
        "waste": round(sum(s.decoded_tokens for s in done) / trained, 3),
        "mean_length_ratio": round(trained / uncensored, 4),
        "bias_meter": round(length_bias(done).ratio, 4),
        "max_age": max(max(s.ages) for s in done),
        "gpu_idle_share": round(1 - sum(s.busy_seconds for s in done) / (step * len(done)), 3),
        "preemptions": sum(s.preemptions for s in done),
        "steps": len(done),
    }


def _rollout(steps: list[StepTrace]) -> float:
    return fmean(step.rollout_seconds for step in steps)


def _step(steps: list[StepTrace]) -> float:
    return fmean(step.step_seconds for step in steps)
