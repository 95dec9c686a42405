"""The live bias meter against the first lengths, which a simulation knows."""

from __future__ import annotations

import pytest

from rollpacker.simulation.compare import model_for
from rollpacker.simulation.parameters import load_parameters
from rollpacker.simulation.scenario import FRESH, MEASURED, Drift, Scenario, ladder
from rollpacker.simulation.simulator import Simulator
from rollpacker.simulation.summary import length_bias
from rollpacker.simulation.workload import Workload, WorkloadRules

PARAMETERS = load_parameters()


@pytest.mark.parametrize(
    ("factors", "drift", "tolerance"),
    [
        ((1.5,), MEASURED, 0.02),
        ((1.5,), FRESH, 0.02),
        ((2.0, 2.0, 2.0), MEASURED, 0.02),
        ((2.0, 2.0, 2.0), FRESH, 0.09),
    ],
)
def test_the_meter_reads_what_a_drained_run_lost(
    factors: tuple[float, ...], drift: Drift, tolerance: float
) -> None:
    rules, steps = ladder(*factors), 16
    law = WorkloadRules(16384, 0.3, PARAMETERS["never_stop_share"])
    workload = Workload(law, steps * rules.prompts_per_step)
    scenario = Scenario(model_for(law.cap), law, rules, drift, steps=steps, scores=False)
    bias = length_bias(list(Simulator(scenario, PARAMETERS, workload).steps()))
    first = workload.first_lengths[:, : rules.responses_per_prompt].mean()
    assert bias.trained_mean / first < 0.99  # the latest states alone would read 1
    assert bias.ratio == pytest.approx(bias.trained_mean / first, abs=tolerance)
