"""How long simulations take: the only place in this package that reads a real clock for a result.

One run of 40 steps of 128 x 8, and single rounds of growing size on replicas that grow with them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from rollpacker.simulation.parameters import MODELS, Parameters
from rollpacker.simulation.scenario import FROZEN, Scenario, ladder
from rollpacker.simulation.simulator import Simulator
from rollpacker.simulation.workload import WorkloadRules

_GPUS_PER_RESPONSE = 1024 / 100_000


def speed_rows(parameters: Parameters, largest: int) -> Iterator[dict[str, Any]]:
    """One row per simulation; seconds of this machine."""
    yield _timed(parameters, steps=40, prompts=128, gpus=64)
    responses = 1000
    while responses < largest:
        yield _round(parameters, responses)
        responses *= 4
    yield _round(parameters, largest)


def _round(parameters: Parameters, responses: int) -> dict[str, Any]:
    """A short round that launches about so many responses."""
    gpus = max(2, 2 * round(responses * _GPUS_PER_RESPONSE / 2))
    return _timed(parameters, steps=2, prompts=responses // 14, gpus=gpus, rounds=1)


def _timed(
    parameters: Parameters, steps: int, prompts: int, gpus: int, rounds: int = 0
) -> dict[str, Any]:
    model = dataclasses.replace(MODELS["32B"], gpus=gpus)
    rules = dataclasses.replace(ladder(1.75, 2.0), prompts_per_step=prompts)
    workload = WorkloadRules(
        model.max_response_tokens, parameters["prompt_correlation"], parameters["never_stop_share"]
    )
    wall, cpu = time.perf_counter(), time.process_time()
    simulator = Simulator(Scenario(model, workload, rules, FROZEN, steps=steps), parameters)
    launched = done = 0
    for step in simulator.steps():
        assert step.round.finish is not None
        launched += (len(step.trained) + len(step.round.finish.deferred)) * 8
        done += 1
        if done == rounds:
            break
    return {
        "steps": done,
        "gpus": gpus,
        "responses": launched,
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "cpu_microseconds_per_response": round(1e6 * (time.process_time() - cpu) / launched, 1),
    }
