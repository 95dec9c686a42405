"""`up`: the local stack in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli.coordinator import DEFAULT_PORT
from rollpacker.cli.failures import run
from rollpacker.local_stack import LocalStack


def up(
    directory: Annotated[
        Path, typer.Option(help="Redis data, weights, checkpoints and logs of the stack.")
    ] = Path("runs/.stack"),
    run_directory: Annotated[
        Path, typer.Option("--runs", help="Where runs leave their outputs.")
    ] = Path("runs"),
    rollouts: Annotated[int, typer.Option(min=1, help="Rollout replicas.")] = 1,
    rewards: Annotated[int, typer.Option(min=1, help="Reward replicas.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Trainer processes.")] = 1,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where the coordinator listens, on 127.0.0.1.")
    ] = DEFAULT_PORT,
) -> None:
    """Start Redis and the four services on this machine, and keep them alive until Ctrl-C.

    A second Ctrl-C kills what has not stopped yet. A new `up` in the same directory goes on.
    """
    stack = LocalStack(
        directory,
        rollouts=rollouts,
        rewards=rewards,
        trainers=trainers,
        run_directory=run_directory,
        coordinator_port=port,
    )

    async def work() -> None:
        print(f"starting; logs: {directory / 'logs'}", flush=True)
        async with stack:
            print(f"coordinator: {stack.coordinator_address}; Ctrl-C stops everything", flush=True)
            await stack.supervisor.wait_failed()

    run(work, on_second_interrupt=stack.kill_all)
