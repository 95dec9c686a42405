"""Replicas that end in good order (SIGTERM) amid their streams: what they decode goes on elsewhere.

Real processes. A run whose replicas are ended again and again must train what an undisturbed one
trains, response for response; the samples tell how many tokens were moved instead of decoded anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.integration.real_runs import RealStack, proof_settings, running_stack
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(600)

PROMPTS, STEPS = 12, 3
VALUES = {
    "tail_batching": {"prompts_per_step": 4, "responses_per_prompt": 4},
    # No token stops, and a replica has few slots: it is amid its responses for most of a step.
    "sampling": {"max_response_tokens": 200, "stop_token_ids": [999]},
}


async def end(real: RealStack, name: str) -> None:
    """SIGTERM; returns when the process runs again."""
    real.note_processes()
    before = await real.pid(name)
    os.kill(before, signal.SIGTERM)
    while real.stack.pids.get(name, before) == before:
        real.stack.supervisor.check()
        await asyncio.sleep(0.01)


async def test_replicas_that_are_ended_amid_their_streams_change_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    values = proof_settings(tmp_path, PROMPTS, **VALUES)
    async with running_stack(tmp_path, slots=2, rollouts=2) as real:
        expected = await real.run("undisturbed", values)
        moved = 0
        for attempt in range(12):  # a run each: the others go on while a replica comes back
            if moved:  # on a slow machine its streams may be over when it hears of its end
                break
            run_id = f"ended-{attempt}"
            await real.start(run_id, values, held=True)
            await end(real, await real.decoding(run_id, 0))
            await real.succeeded(run_id)
            trace = await real.trace(run_id)
            assert len(trace.schedule) == STEPS
            assert trace.schedule == expected.schedule
            assert trace.responses == expected.responses
            moved += sum(
                scored.response.carried_token_count - scored.response.accepted_draft_token_count
                for groups in real.samples(run_id)
                for group in groups
                for scored in group.responses
            )
    assert moved > 0
