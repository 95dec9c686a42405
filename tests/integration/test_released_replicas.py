"""Rounds that give replicas up before their end: real processes, decided by the live policy.

What a released replica decodes goes on at the others; the run must train what an undisturbed one
trains, response for response, and the replica must serve the next round again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.real_runs import proof_settings, running_stack
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(600)

PROMPTS, STEPS = 16, 4


def values(directory: Path, **tail: object) -> dict:
    return proof_settings(
        directory,
        PROMPTS,
        tail_batching={"prompts_per_step": 4, "responses_per_prompt": 4, **tail},
        sampling={"max_response_tokens": 240},
    )


async def test_released_replicas_change_nothing_and_come_back(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    async with running_stack(tmp_path, slots=4, rollouts=2) as real:
        expected = await real.run("undisturbed", values(tmp_path))
        moved = 0
        for rule in ("half", "idle"):
            tail = {"scale_down": True, "scale_down_rule": rule, "rebalance": rule == "idle"}
            for attempt in range(6):  # on a busy machine a round may be over before its release
                run_id = f"scaled-{rule}-{attempt}"
                trace = await real.run(run_id, values(tmp_path, **tail))
                assert trace.schedule == expected.schedule
                assert trace.responses == expected.responses
                metrics = real.metrics(run_id)
                released = [step["scale_down/released_replicas"] for step in metrics]
                assert set(released) <= {0.0, 1.0}
                moved += sum(
                    scored.response.carried_token_count - scored.response.accepted_draft_token_count
                    for groups in real.samples(run_id)
                    for group in groups
                    for scored in group.responses
                )
                if sum(released) >= 2 and moved:
                    break
            assert sum(released) >= 2, "released, and released again after it came back"
    assert moved > 0
    assert all(step["scale_down/released_replicas"] == 0 for step in real.metrics("undisturbed"))
