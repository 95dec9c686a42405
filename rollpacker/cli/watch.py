"""`watch`: a run as it goes. A live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollpacker.cli import run_view
from rollpacker.cli.console import console
from rollpacker.cli.coordinator import Coordinator
from rollpacker.cli.run_view import EventLines, RunView
from rollpacker.v1 import coordinator_service_pb2 as pb

_STEPS_SHOWN = 12
_REFRESH_PER_SECOND = 4


async def follow(
    coordinator: Coordinator, run_id: str, told: str = "", *, to_pause: bool = False
) -> RunView:
    """Show a run until it has ended, or `to_pause` until it is paused; returns what was seen.

    `told`: the run's line so far. Raises UnavailableError when no coordinator answered for as long
    as it has patience.
    """
    view = RunView()
    async with aclosing(coordinator.watch_run(run_id)) as watched:
        events = _applied(watched, view, to_pause=to_pause)
        if sys.stdout.isatty():
            with Live(console=console(), refresh_per_second=_REFRESH_PER_SECOND) as live:
                async for _ in events:
                    live.update(_picture(view))
        else:
            log = EventLines(told)
            async for event in events:
                for line in log.of(event):
                    print(line, flush=True)
    return view


async def _applied(
    events: AsyncIterator[pb.WatchRunResponse], view: RunView, *, to_pause: bool
) -> AsyncIterator[pb.WatchRunResponse]:
    async for event in events:
        view.apply(event)
        yield event
        if to_pause and view.paused:
            return


def _picture(view: RunView) -> RenderableType:
    parts: list[RenderableType] = []
    if view.run is not None:
        left = view.seconds_left
        pace = f"; about {left / 60:.0f} min left" if left is not None else ""
        parts.append(Text(run_view.run_line(view.run) + pace, style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in run_view.STEP_TITLES:
        table.add_column(title, justify="right")
    for step in view.newest_steps(_STEPS_SHOWN):
        table.add_row(*run_view.step_cells(step))
    parts.append(table)
    parts += [Text(f"alarm {alarm.name}: {alarm.text}", style="red") for alarm in view.alarms]
    rewards = view.series(run_view.REWARD)
    if len(rewards) > 1:
        parts.append(Text(f"reward {run_view.sparkline(rewards)} {rewards[-1]:.3f}"))
    if view.progress is not None:
        parts.append(_round(view.progress))
    return Group(*parts)


def _round(progress: pb.RoundProgress) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=max(1, progress.launched_group_count),
        completed=progress.finished_group_count,
        width=24,
    )
    grid.add_row(bar, Text(run_view.progress_line(progress)))
    return grid
