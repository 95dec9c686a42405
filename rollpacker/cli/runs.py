"""The commands that change a run: submit, watch, evaluate, stop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rollpacker.cli import run_view
from rollpacker.cli import watch as live
from rollpacker.cli.console import print_json, print_table
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, Coordinator, CoordinatorAddress
from rollpacker.cli.failures import WORK_FAILED, CommandError, told_in_one_line
from rollpacker.cli.reports import LARGEST, AsJson, RunId, ask
from rollpacker.settings import RunSettings, load_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted overrides: trainer.learning_rate=1e-5"),
]
_NOT_IN_RUN_ID = re.compile(r"[^a-z0-9_-]+")
_LONGEST_RUN_ID = 64


def submit(
    config: Config,
    overrides: Overrides = None,
    run_id: Annotated[str, typer.Option(help="Default: from the run file's name.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow it to its end, or to --until-step.")
    ] = False,
    queue: Annotated[
        bool, typer.Option("--queue", help="Wait for the end of the run that is active.")
    ] = False,
    until_step: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Pause after so many steps; 0: do not.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the resolved settings, as YAML.")
    ] = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Start a run, or resume one that was interrupted."""
    with told_in_one_line():
        settings = load_run_settings(config, overrides or ())
    if dry_run:
        print(resolved_yaml(settings), end="")
        return

    async def work(server: Coordinator) -> None:
        name = run_id or default_run_id(config)
        started = await server.start_run(name, settings, queue=queue, until_step=until_step)
        line = run_view.run_line(started)
        print(line, flush=True)
        if until_step and not pauses_at(started, until_step):
            said = f"note: run {name} was under way, so --until-step {until_step} changes nothing;"
            typer.echo(f"{said} `rollpacker resume {name} --steps N` lets it pause", err=True)
        if watch:
            await follow_to_end(server, name, told=line, to_pause=until_step > 0)

    ask(coordinator, work)


def watch_run(run_id: RunId, coordinator: CoordinatorAddress = DEFAULT_ADDRESS) -> None:
    """Follow a run until it has ended; fails if the run fails. Ctrl-C leaves the run alone."""
    ask(coordinator, lambda server: follow_to_end(server, run_id))


def stop(
    run_id: RunId,
    drain: Annotated[
        bool, typer.Option("--drain", help="Train the deferred draws first; launch nothing new.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Abandon the open step; a resume repeats it.")
    ] = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Stop a run after its current step. `submit` with the same settings goes on."""
    if drain and now:
        raise typer.BadParameter("--drain and --now exclude each other; give one")
    mode = pb.STOP_MODE_AFTER_STEP
    if drain or now:
        mode = pb.STOP_MODE_DRAIN if drain else pb.STOP_MODE_IMMEDIATELY

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.stop_run(run_id, mode)))

    ask(coordinator, work)


def evaluate(
    run_id: RunId,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait; it is measured all the same.")
    ] = 3600.0,
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Measure the held-out sets of a running run with its present weights, between two steps."""

    async def work(server: Coordinator) -> None:
        measured = await server.run_evaluation(run_id, timeout)
        if as_json:
            print_json([measured])
            return
        print(f"weights after {measured.weight_version} updates")
        rows = [(s.name, key, f"{s.scores[key]:.4g}") for s in measured.sets for key in s.scores]
        print_table(("set", "score", ">value"), sorted(rows), "")

    ask(coordinator, work)


async def follow_to_end(
    server: Coordinator, run_id: str, told: str = "", *, to_pause: bool = False
) -> None:
    """Show a run until it has ended, or `to_pause` until it is paused.

    `told` is the line of it that was printed before. Raises CommandError if it failed.
    """
    view = await live.follow(server, run_id, told, to_pause=to_pause)
    if to_pause and view.run is not None and view.paused:
        print(
            f"run {run_id} is paused at step {view.run.step}; `rollpacker resume {run_id}` goes on"
        )
        return
    ended = await server.get_run(run_id)
    if ended.state == pb.Run.STATE_FAILED:
        raise CommandError(f"run {run_id} failed: {ended.failure}", WORK_FAILED)
    print(f"outputs: {ended.run_directory}")


def pauses_at(run: pb.Run, step: int) -> bool:
    """Whether a run that was just started comes to a halt at this step, if not before."""
    is_there = run.state == pb.Run.STATE_PAUSED and run.step >= step
    return is_there or run.pause_at_step == step or run.state in run_view.ENDED


def default_run_id(config: Path) -> str:
    """The file's name without its end, or its directory's for a file named run.yaml.

    Raises CommandError when nothing is left of it.
    """
    path = config.resolve()
    name = path.parent.name if path.stem == "run" else path.stem
    run_id = _NOT_IN_RUN_ID.sub("-", name.lower()).strip("-")[:_LONGEST_RUN_ID]
    if not run_id:
        raise CommandError(f"no run id can be made from {config}; give one with --run-id")
    return run_id


def resolved_yaml(settings: RunSettings) -> str:
    """The settings as a run file, with the defaults that depend on the mode filled in."""
    values = settings.model_dump(mode="json")
    rules = settings.tail_batching
    values["tail_batching"] |= {
        "deferral_levels": rules.resolved_levels,
        "speculation_factors": list(rules.resolved_speculation_factors),
        "response_speculation_factor": rules.resolved_response_speculation_factor,
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
