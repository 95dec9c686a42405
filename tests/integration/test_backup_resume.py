"""A run that was stopped in the middle of a step goes on elsewhere from a backup alone."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.integration.real_runs import Moment, RealStack, proof_settings, running_stack
from tests.tiny_run import write_model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

VALUES = {
    "tail_batching": {"prompts_per_step": 4, "responses_per_prompt": 4},
    "sampling": {"max_response_tokens": 60},
}
RUN = "interrupted"
STOP_STEP = 2


async def stop_at(real: RealStack, values: dict[str, Any], moment: Moment) -> pb.Run:
    """Start the run and stop it there at once, with its step open."""
    await real.start(RUN, values, held=True)
    await real.reach(RUN, moment)
    await real.stop(RUN, pb.STOP_MODE_IMMEDIATELY)
    run = await real.get(RUN)
    assert run.state == pb.Run.STATE_STOPPED, run.failure
    return run


async def rollpacker(*words: str | Path) -> str:
    """The command, as a process; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from rollpacker.cli.main import app; app()", *map(str, words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_a_run_restored_on_another_machine_trains_what_the_undisturbed_one_trains(
    tmp_path: Path,
) -> None:
    """The first stack is gone with its Redis, weights and checkpoints before the second starts."""
    write_model(tmp_path / "model")
    values = proof_settings(tmp_path, 20, **VALUES)
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "run.tar"
    async with running_stack(here, slots=1) as real:
        undisturbed = await real.run("undisturbed", values)
        stopped = await stop_at(real, values, Moment(STOP_STEP, 1))
        assert STOP_STEP <= stopped.step < len(undisturbed.schedule)
        await rollpacker("backup", RUN, file, "--stack", here, "--runs", here / "runs")
    shutil.rmtree(here)
    async with running_stack(there, slots=1) as real:
        said = await rollpacker("restore", file, "--stack", there, "--runs", there / "runs")
        assert f"run {RUN}, stopped at step {stopped.step}" in said
        await real.start(RUN, values)
        run = await real.succeeded(RUN)
        trace = await real.trace(RUN)
    assert run.step == len(undisturbed.schedule)
    assert trace.schedule == undisturbed.schedule
    assert trace.responses == undisturbed.responses
    assert trace.metrics == undisturbed.metrics
    last = max(undisturbed.weights)
    assert last in trace.weights
    assert trace.weights.items() <= undisturbed.weights.items()
