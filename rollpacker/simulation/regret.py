"""How much the planner loses against the best fixed ladder, chosen in hindsight.

Regret of a scenario = mean rollout seconds of `auto` over those of its best fixed ladder, minus 1.
The best single setting is the fixed ladder with the lowest mean over scenarios of the same ratio.
Weights are frozen and nothing is carried over, so that only the schedule counts. One scenario is
not stationary: its lengths double over the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from rollpacker.simulation.compare import AUTO_START, Mode, run_mode
from rollpacker.simulation.parameters import Parameters
from rollpacker.simulation.scenario import FROZEN, OVERLAP, ladder
from rollpacker.simulation.workload import Workload, WorkloadRules

FIXED: tuple[tuple[float, ...], ...] = (
    (),
    (1.25,),
    (1.5,),
    (2.0,),
    (1.5, 1.5),
    (1.75, 2.0),
    (2.0, 2.0),
    (2.0, 2.0, 2.0),
)
SCENARIOS = (
    *((cap, rho, 1.0) for cap in (8192, 16384, 32768) for rho in (0.3, 0.6, 0.9)),
    (32768, 0.3, 2.0),
)


def regret_rows(parameters: Parameters, steps: int) -> Iterator[dict[str, Any]]:
    """One row per scenario: seconds of each fixed ladder, of the planner, and its regret."""
    for cap, rho, growth in SCENARIOS:
        rules = WorkloadRules(cap, rho, parameters["never_stop_share"], length_growth=growth)
        workload = Workload(rules, steps * OVERLAP.prompts_per_step)
        fixed = {
            _name(factors): _seconds(parameters, factors, workload, rules, steps, planned=False)
            for factors in FIXED
        }
        auto = _seconds(parameters, AUTO_START, workload, rules, steps, planned=True)
        best = min(fixed, key=fixed.__getitem__)
        yield {
            "cap": cap,
            "rho": rho,
            "length_growth": growth,
            "auto": round(auto, 2),
            "best": best,
            "regret": round(auto / fixed[best] - 1.0, 4),
            "fixed": {name: round(seconds, 2) for name, seconds in fixed.items()},
        }


def summary_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all scenarios: the planner's regret, and the best single setting's."""
    regrets = [row["regret"] for row in rows]
    mean_of = {
        name: fmean(row["fixed"][name] / row["fixed"][row["best"]] - 1.0 for row in rows)
        for name in rows[0]["fixed"]
    }
    single = min(mean_of, key=mean_of.__getitem__)
    return {
        "scenarios": len(rows),
        "share_within_3_percent": round(fmean(regret <= 0.03 for regret in regrets), 3),
        "largest_regret": max(regrets),
        "mean_regret": round(fmean(regrets), 4),
        "best_single_setting": single,
        "its_mean_regret": round(mean_of[single], 4),
    }


def _seconds(
    parameters: Parameters,
    factors: tuple[float, ...],
    workload: Workload,
    rules: WorkloadRules,
    steps: int,
    *,
    planned: bool,
) -> float:
    base = ladder(*factors) if factors else dataclasses.replace(OVERLAP)
    mode = Mode("auto" if planned else "fixed", base, FROZEN, "frozen", "none", planned=planned)
    done = run_mode(parameters, mode, workload, rules, steps)
    return fmean(step.rollout_seconds for step in done)


def _name(factors: tuple[float, ...]) -> str:
    return ",".join(f"{factor:g}" for factor in factors) or "none"
