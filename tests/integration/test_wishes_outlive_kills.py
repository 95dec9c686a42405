"""A run that is paused, changed and stepped while its coordinator is killed after every wish."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rollpacker.client import AsyncClient, connect
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.integration.real_runs import RealStack, proof_settings, running_stack, trained_draws
from tests.tiny_run import write_model

pytestmark = pytest.mark.timeout(300)
RUN = "r"
PATIENCE_SECONDS = 120.0


async def paused(client: AsyncClient, real: RealStack) -> pb.Run:
    """Wait until the run is paused."""
    async for event in client.watch_run(RUN):
        real.stack.supervisor.check()
        if event.HasField("run_changed") and event.run_changed.state == pb.Run.STATE_PAUSED:
            return event.run_changed
    raise AssertionError(f"the run has ended: {await client.get_run(RUN)}")


async def test_every_wish_outlives_the_coordinator_that_took_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    values = proof_settings(tmp_path, 16, tail_batching={"prompts_per_step": 4})
    async with (
        running_stack(tmp_path) as real,
        connect(real.stack.layout.address("coordinator"), PATIENCE_SECONDS) as client,
    ):
        await real.start(RUN, values, held=True)
        await client.resume_run(RUN, until_step=2)
        await real.kill("coordinator")
        assert (await paused(client, real)).step == 2
        await client.update_run(
            RUN, {"trainer": {"learning_rate": 0.0}, "sampling": {"temperature": 0.5}}
        )
        await client.start_run("next", values, queue=True)
        row = {"prompt_id": "new", "prompt": "1+1=", "reference": {"answer": "2"}}
        assert (await client.add_prompts(RUN, [row])).added_count == 1
        await real.kill("coordinator")
        assert (await client.add_prompts(RUN, [row])).known_count == 1
        assert await client.save_checkpoint(RUN) == 2
        run = await client.get_run(RUN)
        assert (run.state, run.pending_change_count) == (pb.Run.STATE_PAUSED, 1)
        await client.step_run(RUN)
        await real.kill("coordinator")
        assert (await paused(client, real)).step == 3
        await client.resume_run(RUN)
        run = await real.succeeded(RUN)
        trace, steps = await real.trace(RUN), await real.steps(RUN)
        rates = [step.metrics["trainer/learning_rate"] for step in steps]
        assert (await real.succeeded("next")).step == 4
    assert Counter(trained_draws(trace)) == Counter(["0:new", *(f"0:{i}" for i in range(1, 17))])
    assert rates == [1e-3] * 2 + [0.0] * (len(steps) - 2)
    assert not run.waiting_settings.fields
    assert run.updated_settings["sampling"]["temperature"] == 0.5
