"""`demo`: a real run of the whole system on this machine, and the same run without tail batching.

Two runs in one local stack, one after the other: `demo` (mode exact) and `demo-synchronous`, with
the same initial weights, prompts, seed and optimizer. Both go to the end of their data and drain.
The table at the end is computed from the outputs of these very runs; no number is stored.
An interrupted demo is resumed by the next call, a finished one is moved aside (`demo_state`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli import watch
from rollpacker.cli.console import console
from rollpacker.cli.coordinator import connect
from rollpacker.cli.demo_state import DemoState
from rollpacker.cli.failures import WORK_FAILED, WRONG_INPUT, CommandError, run, told_in_one_line
from rollpacker.cli.runs import Overrides
from rollpacker.local_stack import LocalStack
from rollpacker.local_stack.lock import directory_lock
from rollpacker.settings import RunSettings, load_run_settings, parse_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb

DEMO = "demo"
SYNCHRONOUS = "demo-synchronous"
_REPOSITORY = Path(__file__).parents[2]
_PATIENCE_SECONDS = 300.0  # the stack restarts a coordinator that died; the stack knows its limit


class Engine(enum.StrEnum):
    """What samples the responses."""

    TORCH = "torch"
    SGLANG = "sglang"


class Model(enum.StrEnum):
    """Which directory below demo/ is run."""

    GCD = "gcd"
    SMOLLM2 = "smollm2"


def demo(
    overrides: Overrides = None,
    model: Annotated[Model, typer.Option(help="The tiny model, or SmolLM2-135M.")] = Model.GCD,
    config: Annotated[
        Path | None, typer.Option(help="Another run file, instead of that of the model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of data order and responses.")] = None,
    engine: Annotated[
        Engine, typer.Option(help="The embedded engine, or SGLang (`make sglang` installs it).")
    ] = Engine.TORCH,
    only: Annotated[
        str, typer.Option(metavar="RUN", help=f"{DEMO} or {SYNCHRONOUS}; default: both.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--runs", help="Where runs leave their outputs.")
    ] = Path("runs"),
) -> None:
    """Train a small model on this machine, in mode exact and then synchronous; compare the two."""
    with told_in_one_line():
        wanted = wanted_runs(only)
        seeded = [] if seed is None else [f"seed={seed}"]
        settings = demo_settings(config or run_file(model), [*(overrides or ()), *seeded])
        state = DemoState(
            directory, {run_id: it.model_dump(mode="json") for run_id, it in settings.items()}
        )
        if state.stack_directory.exists():
            with directory_lock(state.stack_directory):  # nobody runs it now
                pass
        print(state.open(wanted), flush=True)
        rollout_settings = engine_settings(engine)
    stack = LocalStack(
        state.stack_directory, run_directory=directory, rollout_settings=rollout_settings
    )

    async def work() -> None:
        print(f"starting Redis and the services; logs: {stack_logs(state)}", flush=True)
        async with stack:
            for run_id in wanted:
                await stack.run_beside(train(stack, run_id, settings[run_id]))
                state.finish(run_id)
        show_results([directory / run_id for run_id in wanted])

    try:
        run(work, on_second_interrupt=stack.kill_all)
    except typer.Exit:
        typer.echo(f"the same command goes on from here; logs: {stack_logs(state)}", err=True)
        raise


def wanted_runs(only: str) -> list[str]:
    """The run ids of this call. Raises CommandError."""
    if only and only not in (DEMO, SYNCHRONOUS):
        raise CommandError(f"--only: {only} is neither {DEMO} nor {SYNCHRONOUS}", WRONG_INPUT)
    return [only] if only else [DEMO, SYNCHRONOUS]


def engine_settings(engine: Engine) -> dict[str, object]:
    """Settings of the rollout replicas that choose the engine. Raises CommandError."""
    if engine is Engine.TORCH:
        return {}
    python = _REPOSITORY / ".venv-sglang" / "bin" / "python"
    if not python.is_file():
        raise CommandError(
            f"{python} is missing; `make sglang` in a checkout of the repository installs SGLang",
            WRONG_INPUT,
        )
    return {"engine": engine.value, "sglang_python": python}


def run_file(model: Model) -> Path:
    """The run file that the repository has for a model. Raises CommandError."""
    path = _REPOSITORY / "demo" / model.value / "run.yaml"
    if not path.is_file():
        raise CommandError(
            f"{path} is missing; the demo needs a checkout of the repository, or --config",
            WRONG_INPUT,
        )
    fetched = _REPOSITORY / ".local" / model.value / "model"
    if model is Model.SMOLLM2 and not fetched.is_dir():
        raise CommandError(
            f"--model {model}: {fetched} is missing; `make demo MODEL={model}` fetches it once",
            WRONG_INPUT,
        )
    return path


def demo_settings(config: Path, overrides: Sequence[str]) -> dict[str, RunSettings]:
    """Settings of both runs, by run id. Raises SettingsError."""
    settings = load_run_settings(config, overrides)
    return {DEMO: settings, SYNCHRONOUS: as_synchronous(settings)}


def as_synchronous(settings: RunSettings) -> RunSettings:
    """The same run in mode synchronous: no level, no speculation, everything else equal."""
    values = settings.model_dump(mode="json")
    values["tail_batching"] |= {
        "mode": "synchronous",
        "deferral_levels": None,
        "speculation_factors": None,
        "response_speculation_factor": None,
        "selection_weights": None,
    }
    return parse_run_settings(values)


async def train(stack: LocalStack, run_id: str, settings: RunSettings) -> None:
    """Run to the end. Raises CommandError when it ends otherwise than by success."""
    async with connect(stack.coordinator_address, _PATIENCE_SECONDS) as coordinator:
        print(f"{run_id}: mode {settings.tail_batching.mode}", flush=True)
        await coordinator.start_run(run_id, settings)
        await watch.follow(coordinator, run_id)
        ended = await coordinator.get_run(run_id)
    if ended.state == pb.Run.STATE_FAILED:
        raise CommandError(f"run {run_id} failed: {ended.failure}", WORK_FAILED)
    if ended.state != pb.Run.STATE_SUCCEEDED:
        raise CommandError(f"run {run_id} was stopped before its end", WORK_FAILED)


def show_results(directories: Sequence[Path]) -> None:
    """What the runs' own outputs say: a comparison of two, or where to look for one.

    Raises CommandError when the outputs cannot be read.
    """
    from services.coordinator.outputs import RunDirectoryError, comparison_table, write_comparison

    run_directory, *baseline = directories
    if baseline:
        try:
            comparison = write_comparison(run_directory, baseline[0])
        except RunDirectoryError as error:
            raise CommandError(str(error), WORK_FAILED) from error
        console().print(comparison_table(comparison))
    for directory in directories:
        print(f"report: {directory / 'report.html'}")


def stack_logs(state: DemoState) -> Path:
    return state.stack_directory / "logs"
