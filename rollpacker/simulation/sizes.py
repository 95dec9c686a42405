"""A tensor-parallel size for each level: what mode auto makes of it, and what it is worth.

The same run in mode `auto` at the paper's size for all levels, and with sizes that it chooses
itself from what its rounds show, as a live run does: it begins with the paper's size, and each size
that it tries costs a round or more, and a resize. Weights are frozen, and idle replicas take groups
over and train (as in the last lines of `compare`), so that only the sizes differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean
from typing import Any

from rollpacker.simulation.compare import AUTO_START, Mode, run_mode
from rollpacker.simulation.parameters import Parameters
from rollpacker.simulation.scenario import FROZEN, ladder
from rollpacker.simulation.simulator import StepTrace
from rollpacker.simulation.workload import Workload, WorkloadRules

SCENARIOS = tuple((cap, rho) for cap in (8192, 16384, 32768, 65536) for rho in (0.3, 0.6))
RESIZE_SECONDS = (0.0, 60.0, 240.0)


def size_rows(parameters: Parameters, steps: int) -> Iterator[dict[str, Any]]:
    """One row per scenario and duration of a resize."""
    for cap, rho in SCENARIOS:
        rules = WorkloadRules(cap, rho, parameters["never_stop_share"])
        workload = Workload(rules, steps * 128)
        one = run_mode(parameters, _mode("the paper's"), workload, rules, steps)
        for resize in RESIZE_SECONDS:
            slower = parameters.replace({"resize_seconds": resize})
            own = run_mode(slower, _mode("planned"), workload, rules, steps)
            before, after = (fmean(s.step_seconds for s in done) for done in (one, own))
            yield {
                "cap": cap,
                "rho": rho,
                "resize_seconds": resize,
                "step_seconds": round(before, 2),
                "step_seconds_planned": round(after, 2),
                "saved_share": round(1.0 - after / before, 4),
                "rollout_seconds": round(fmean(s.rollout_seconds for s in one), 2),
                "rollout_seconds_planned": round(fmean(s.rollout_seconds for s in own), 2),
                "resizes_per_step": round(_resizes(own), 3),
                "sizes": _usual_sizes(own),
            }


def _mode(sizes: str) -> Mode:
    return Mode(
        "auto",
        ladder(*AUTO_START),
        FROZEN,
        "frozen",
        "none",
        planned=True,
        schedule="rebalance, idle",
        sizes=sizes,
    )


def _resizes(steps: list[StepTrace]) -> float:
    """How often the next round has another size, per step."""
    return fmean(a.tensor_parallel_size != b.tensor_parallel_size for a, b in pairwise(steps))


def _usual_sizes(steps: list[StepTrace]) -> dict[int, int]:
    """The size that most rounds of each level had in the second half of the run."""
    half = [step for step in steps if 2 * step.step >= len(steps)]
    levels = sorted({step.level for step in half})
    return {
        level: Counter(s.tensor_parallel_size for s in half if s.level == level).most_common(1)[0][
            0
        ]
        for level in levels
    }
