"""Mode auto with real processes: whatever it plans, and whoever is killed meanwhile, over a drained
epoch at fixed weights it trains the responses of `synchronous`, each once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollpacker.simulation.recorded_run import replay_rows
from tests.integration.real_runs import (
    Moment,
    RealStack,
    Trace,
    proof_settings,
    running_stack,
    trained_draws,
)
from tests.tiny_run import write_model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

STEPS, PROMPTS_PER_STEP, RESPONSES, CAP = 26, 4, 4, 40


def settings(directory: Path, mode: str) -> dict[str, Any]:
    return proof_settings(
        directory,
        STEPS * PROMPTS_PER_STEP,
        tail_batching={
            "mode": mode,
            "prompts_per_step": PROMPTS_PER_STEP,
            "responses_per_prompt": RESPONSES,
            "max_deferral_age": 32,
        },
        sampling={"max_response_tokens": CAP},
        trainer={"learning_rate": 0},
    )


async def disturbed_run(real: RealStack, run_id: str) -> Trace:
    """Its coordinator is killed twice: in a round, and while the run is paused."""
    await real.start(run_id, settings(real.directory, "auto"), held=True)
    await real.reach(run_id, Moment(5, 1))
    await real.kill("coordinator")
    await real.paused_at(run_id, 18)
    await real.kill("coordinator")
    await real.go_on_until(run_id, 0)
    await real.succeeded(run_id)
    return await real.trace(run_id)


def responses(trace: Trace) -> Counter[Any]:
    return Counter(response for step in trace.responses for group in step for response in group)


async def test_a_run_that_is_killed_and_paused_trains_what_synchronous_does(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model")
    async with running_stack(tmp_path) as real:
        auto = await disturbed_run(real, "auto")
        synchronous = await real.run("synchronous", settings(tmp_path, "synchronous"))
        rows = list(replay_rows(real.stack.layout.run_directory / "auto"))
        ladders = [line["tail/deferral_levels"] for line in real.metrics("auto")]
    assert responses(auto) == responses(synchronous)
    assert set(Counter(trained_draws(auto)).values()) == {1}
    assert rows[0]["differences"] == 0  # of the rounds' commands
    reasons = [row["reason"] for row in rows if row["figure"] == "ladder"]
    assert rows[-1] == {"figure": "ladders", "choices": len(reasons), "differences": 0}
    assert ladders[0] == 1
    assert any("s a round" in reason for reason in reasons)  # it did measure and plan
