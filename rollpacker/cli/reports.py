"""The commands that only ask: status, steps, samples, deferred, workers, devices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from rollpacker import wire
from rollpacker.cli import run_view
from rollpacker.cli.console import print_json, print_table, printable, shorten
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, Coordinator, CoordinatorAddress, connect
from rollpacker.cli.failures import run
from rollpacker.rpc.struct_values import read_struct
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
LARGEST = 10**9  # of the whole numbers that commands take
_TEXT_LIMIT = 60


def ask(address: str, work: Callable[[Coordinator], Coroutine[Any, Any, None]]) -> None:
    """Run one command against a coordinator."""

    async def connected() -> None:
        async with connect(address) as coordinator:
            await work(coordinator)

    run(connected)


def status(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="One run only.")] = "",
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Show all runs, or where one run stands."""

    async def work(server: Coordinator) -> None:
        runs = [await server.get_run(run_id)] if run_id else await server.list_runs()
        if as_json:
            print_json(runs)
        elif run_id:
            _print_run(runs[0])
        else:
            columns = ("run", "state", ">step", ">of", ">deferred", ">version", "started")
            print_table(columns, map(_run_cells, runs), "no runs yet; start one with submit")

    ask(coordinator, work)


def steps(
    run_id: RunId,
    limit: Annotated[int, typer.Option(min=0, help="Newest steps to show; 0: all.")] = 20,
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """List the committed steps of a run, newest last."""

    async def work(server: Coordinator) -> None:
        found = (await server.list_steps(run_id, limit))[::-1]
        if as_json:
            print_json(found)
        else:
            columns = [f">{title}" for title in run_view.STEP_TITLES]
            print_table(columns, map(run_view.step_cells, found), "no step is committed yet")

    ask(coordinator, work)


def samples(
    run_id: RunId,
    step: Annotated[int, typer.Argument(min=0, max=LARGEST, help="The step, from 0.")],
    to: Annotated[
        int | None, typer.Option(min=0, max=LARGEST, help="The last step; default: STEP.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Of this prompt only.")] = "",
    min_reward: Annotated[float | None, typer.Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="With at most this reward.")] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Of at least so many tokens.")
    ] = 0,
    text: Annotated[bool, typer.Option("--text", help="Whole responses, not their start.")] = False,
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """List the trained responses of one step, or of several."""

    async def work(server: Coordinator) -> None:
        groups = await server.list_samples(
            run_id,
            step,
            last_step=to,
            prompt_id=prompt,
            min_reward=min_reward,
            max_reward=max_reward,
            min_tokens=min_tokens,
        )
        if as_json:
            print_json(groups)
            return
        columns = ("prompt", ">epoch", ">index", ">tokens", ">reward", ">advantage", "verdict")
        rows = [_sample_cells(group, item, text) for group in groups for item in group.responses]
        print_table((*columns, "text"), rows, "the step trained no response")

    ask(coordinator, work)


def deferred(
    run_id: RunId,
    as_json: AsJson = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """List the long-prompt queue: the draws that were deferred and wait for their round."""

    async def work(server: Coordinator) -> None:
        draws = await server.list_deferred_draws(run_id)
        if as_json:
            print_json(draws)
            return
        step = (await server.get_run(run_id)).step
        rows = (
            (str(draw.level), draw.prompt_id, str(draw.epoch), str(step - draw.first_step))
            for draw in draws
        )
        print_table((">level", "prompt", ">epoch", ">age"), rows, "the queue is empty")

    ask(coordinator, work)


def workers(as_json: AsJson = False, coordinator: CoordinatorAddress = DEFAULT_ADDRESS) -> None:
    """List the workers that are registered."""

    async def work(server: Coordinator) -> None:
        found = await server.list_workers()
        if as_json:
            print_json(found)
        else:
            columns = ("worker", "kind", "address", ">lease s", ">running", ">waiting", ">kv %")
            empty = "no worker is registered; their logs say whether they reach the coordinator"
            print_table((*columns, ">preempted"), map(_worker_cells, found), empty)

    ask(coordinator, work)


def devices(as_json: AsJson = False, coordinator: CoordinatorAddress = DEFAULT_ADDRESS) -> None:
    """List the GPUs that workers hold."""

    async def work(server: Coordinator) -> None:
        found = await server.list_devices()
        if as_json:
            print_json(found)
        else:
            columns = ("device", "worker", ">fence", ">lease s", ">free GiB at grant")
            print_table(columns, map(_device_cells, found), "no worker holds a GPU")

    ask(coordinator, work)


def _print_run(run: pb.Run) -> None:
    print_table(
        ("", ""),
        (
            ("run", run.run_id),
            ("state", run_view.state_name(run)),
            *([("failure", printable(run.failure))] if run.failure else []),
            ("steps", f"{run.step} of {run.planned_steps}" if run.planned_steps else str(run.step)),
            ("weight version", str(run.weight_version)),
            ("deferred draws", str(run.deferred_draw_count)),
            *_wishes(run),
            ("weights", run.weights_uri),
            ("outputs", run.run_directory),
            ("started", _when(run.create_time)),
        ),
        "",
    )


def _wishes(run: pb.Run) -> list[tuple[str, str]]:
    """What people asked of the run; nothing in most runs."""
    updated = read_struct("updated_settings", run.updated_settings)
    waiting = read_struct("waiting_settings", run.waiting_settings)
    rows = [
        ("updated", json.dumps(updated) if updated else ""),
        ("updated when drained", json.dumps(waiting) if waiting else ""),
        ("pending changes", str(run.pending_change_count or "")),
        ("pauses at step", str(run.pause_at_step or "")),
        ("place in the queue", str(run.queue_position or "")),
        ("added prompts", str(run.added_prompt_count or "")),
        ("dropped draws", str(run.dropped_draw_count or "")),
    ]
    return [(name, value) for name, value in rows if value]


def _run_cells(run: pb.Run) -> tuple[str, ...]:
    return (
        run.run_id,
        run_view.state_name(run),
        str(run.step),
        str(run.planned_steps or "-"),
        str(run.deferred_draw_count),
        str(run.weight_version),
        _when(run.create_time),
    )


def _sample_cells(
    group: types_pb2.PromptGroup, item: types_pb2.ScoredResponse, whole_text: bool
) -> tuple[str, ...]:
    verdict = wire.verdict_from_proto(item.verdict)
    text = printable(item.text)
    return (
        group.draw.prompt_id,
        str(group.draw.epoch),
        str(item.response.index),
        str(len(item.response.token_ids)),
        f"{item.reward:.3f}" if item.HasField("reward") else "-",
        f"{item.advantage:.3f}",
        verdict.value if verdict else "-",
        text if whole_text else shorten(text, _TEXT_LIMIT),
    )


def _worker_cells(worker: pb.Worker) -> tuple[str, ...]:
    lease = wire.timestamp_from_proto(worker.lease_expire_time) - time.time()
    kind = pb.WorkerKind.Name(worker.kind).removeprefix("WORKER_KIND_").lower()
    cells = (worker.worker_id, kind, worker.address, f"{lease:.0f}")
    if not worker.HasField("engine_stats"):
        return (*cells, "-", "-", "-", "-")
    stats = worker.engine_stats
    return (
        *cells,
        str(stats.running_response_count),
        str(stats.waiting_response_count),
        f"{100 * stats.kv_cache_usage:.0f}",
        str(stats.preemption_count),
    )


def _device_cells(lease: pb.DeviceLease) -> tuple[str, ...]:
    left = wire.timestamp_from_proto(lease.expire_time) - time.time()
    free = f"{lease.free_bytes / 2**30:.1f}"
    worker = f"{lease.worker_id} (guest)" if lease.is_guest else lease.worker_id
    lasts = f"{left:.0f}" if left > 0 else "lapsed"
    return (lease.device, worker, str(lease.fence), lasts, free)


def _when(timestamp: Timestamp) -> str:
    return time.strftime("%F %T", time.localtime(wire.timestamp_from_proto(timestamp)))
