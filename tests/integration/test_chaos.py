"""A short run under a mix of faults: kills, pauses and cut connections of every process.

benchmarks/chaos.py does the same to the demo job, with as many faults as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.audit import violations
from tests.chaos.disturb import disturb, linked_stack
from tests.chaos.faults import Fault, FaultKind
from tests.integration.real_runs import OUTCOME, Moment, proof_settings
from tests.tiny_run import write_model

PROMPTS, PROMPTS_PER_STEP, RESPONSES = 96, 4, 4
SECONDS = 3.0  # longer than the leases


def fault(kind: FaultKind, target: str, step: int, stage: int, *, together: bool = False) -> Fault:
    return Fault(kind, target, Moment(step, stage), 0.05, SECONDS, together)


FAULTS = [
    fault(FaultKind.SILENCE, "redis", 1, 1),
    fault(FaultKind.REFUSE, "rollout-0", 2, 1),
    fault(FaultKind.SILENCE, "rollout-1", 4, 2),
    fault(FaultKind.KILL, "reward-0", 4, 2, together=True),
    fault(FaultKind.SILENCE, "trainer-0", 6, OUTCOME),
    fault(FaultKind.REFUSE, "redis", 8, 2),
    fault(FaultKind.REFUSE, "coordinator", 10, 0),
    fault(FaultKind.KILL, "coordinator", 12, 1),
    fault(FaultKind.PAUSE, "redis", 12, 3, together=True),
    fault(FaultKind.SILENCE, "reward-0", 14, 1),
]


@pytest.mark.timeout(600)
async def test_a_run_amid_kills_pauses_and_cuts_trains_what_the_undisturbed_run_trains(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model")
    values = proof_settings(
        tmp_path,
        PROMPTS,
        tail_batching={"prompts_per_step": PROMPTS_PER_STEP, "responses_per_prompt": RESPONSES},
        sampling={"max_response_tokens": 120},
    )
    async with linked_stack(tmp_path, rollouts=2, rewards=1, trainers=1, slots=1) as linked:
        await linked.real.run("undisturbed", values)
        await linked.real.start("disturbed", values, held=True)
        assert await disturb(linked, "disturbed", FAULTS, held=True) == len(FAULTS)
        await linked.real.succeeded("disturbed")
        runs = linked.real.stack.layout.run_directory
    found = violations(
        runs / "disturbed",
        runs / "undisturbed",
        prompts=PROMPTS,
        epochs=1,
        responses=RESPONSES,
    )
    assert found == []
