"""`regrade RUN`: scores the stored samples of a run again; the old scores stay as they are."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import Annotated

import typer

from rollpacker.cli.console import print_json, print_table
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, Coordinator, CoordinatorAddress
from rollpacker.cli.reports import LARGEST, AsJson, RunId, ask
from rollpacker.v1 import coordinator_service_pb2 as pb

_COLUMNS = (">step", ">responses", ">changed", ">none", ">old mean", ">mean")


def regrade(
    run_id: RunId,
    name: Annotated[
        str, typer.Option(help="Names the result; the same name goes on. Default: the time.")
    ] = "",
    first: Annotated[int, typer.Option(min=0, max=LARGEST, help="From this step on.")] = 0,
    last: Annotated[
        int, typer.Option(min=-1, max=LARGEST, help="To this step, included; -1: the newest.")
    ] = -1,
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Score the stored samples of a run again, without inference, by the data as it is now."""
    regrade_id = name or time.strftime("%Y%m%d-%H%M%S")
    request = pb.RegradeSamplesRequest(run_id=run_id, regrade_id=regrade_id, first_step=first)
    if last >= 0:
        request.last_step = last

    async def work(server: Coordinator) -> None:
        steps = []
        async for step in server.regrade_samples(request):
            steps.append(step)
            if as_json:
                print_json([step])
        if steps and not as_json:
            print_table(_COLUMNS, map(_cells, steps), "")
            print(f"the scores are in {PurePath(steps[0].file).parent}")

    ask(coordinator, work)


def _cells(step: pb.RegradeSamplesResponse) -> tuple[str, ...]:
    counts = (step.step, step.response_count, step.changed_count, step.none_count)
    old = f"{step.old_mean_reward:.3f}" if step.HasField("old_mean_reward") else "-"
    new = f"{step.mean_reward:.3f}" if step.HasField("mean_reward") else "-"
    return (*map(str, counts), old, new)
