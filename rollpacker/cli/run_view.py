"""What a watcher knows of a run: events in, rows of text out. Pure.

The names of metrics stand here, and nowhere else in the commands.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker import wire
from rollpacker.cli.console import printable
from rollpacker.policy.alarms import Alarm, find_alarm
from rollpacker.v1 import coordinator_service_pb2 as pb

ENDED = frozenset({pb.Run.STATE_SUCCEEDED, pb.Run.STATE_FAILED, pb.Run.STATE_STOPPED})
_STEPS_FOR_PACE = 20
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """A metric as a column: its title, the metric's name, and how it is written."""

    title: str
    metric: str
    decimals: int


QUEUE_LENGTH = "tail/queue_length"
REWARD = "reward/mean"
COLUMNS = (
    Column("reward", REWARD, 3),
    Column("tokens", "response_length/mean", 0),
    Column("longest", "response_length/max", 0),
    Column("deferred", "tail/deferred_groups", 0),
    Column("queue", QUEUE_LENGTH, 0),
    Column("rollout s", "timing_s/rollout", 1),
    Column("train s", "timing_s/train_wait", 1),
    Column("step s", "timing_s/step", 1),
)
STEP_TITLES = ("step", "round", "level", *(column.title for column in COLUMNS))


@dataclass(slots=True)
class RunView:
    """A run as its events told it so far."""

    run: pb.Run | None = None
    steps: dict[int, pb.Step] = field(default_factory=dict)  # by number
    progress: pb.RoundProgress | None = None

    def apply(self, event: pb.WatchRunResponse) -> None:
        """Take in one event. A repeat changes nothing."""
        kind = event.WhichOneof("event")
        if kind == "run_changed":
            self.run = event.run_changed
            self.progress = None if self.ended else self.progress
        elif kind == "step_finished":
            self._finish(event.step_finished)
        elif kind == "round_progress":
            self.progress = event.round_progress

    def _finish(self, step: pb.Step) -> None:
        self.steps[step.step] = step
        self.progress = None
        if self.run is not None and step.step >= self.run.step:
            self.run.step = step.step + 1
            self.run.weight_version = step.weight_version
            self.run.deferred_draw_count = round(step.metrics.get(QUEUE_LENGTH, 0.0))

    @property
    def seconds_left(self) -> float | None:
        """What the planned steps still take at the pace of the newest ones; None: not known."""
        newest = self.newest_steps(_STEPS_FOR_PACE)
        if self.run is None or len(newest) < 2 or self.ended:
            return None
        first, last = (wire.timestamp_from_proto(newest[at].end_time) for at in (0, -1))
        steps_left = max(0, self.run.planned_steps - self.run.step)
        return (last - first) / (len(newest) - 1) * steps_left

    @property
    def ended(self) -> bool:
        return self.run is not None and self.run.state in ENDED

    @property
    def paused(self) -> bool:
        """Whether the run is paused, and the last step before has been told."""
        if self.run is None or self.run.state != pb.Run.STATE_PAUSED:
            return False
        return self.run.step <= max(self.steps, default=-1) + 1

    def newest_steps(self, count: int) -> list[pb.Step]:
        """The newest steps, oldest of them first."""
        return [self.steps[number] for number in sorted(self.steps)[-count:]]

    @property
    def alarms(self) -> list[Alarm]:
        """Those of the newest step."""
        return [alarm for step in self.newest_steps(1) for alarm in step_alarms(step)]

    def series(self, metric: str) -> list[float]:
        """A metric over the steps that have it."""
        found = (self.steps[number].metrics.get(metric) for number in sorted(self.steps))
        return [value for value in found if value is not None]


class EventLines:
    """Events as lines of a log, which wants what is settled: rounds in progress are left out.

    The state of a run may be told many times, and an alarm holds for many steps: each is said when
    it begins.
    """

    def __init__(self, told: str = "") -> None:
        """`told`: the line of the run that the log has already."""
        self._run = told
        self._raised: set[str] = set()

    def of(self, event: pb.WatchRunResponse) -> list[str]:
        """What an event adds to the log."""
        kind = event.WhichOneof("event")
        if kind == "step_finished":
            raised = step_alarms(event.step_finished)
            new = [alarm for alarm in raised if alarm.name not in self._raised]
            self._raised = {alarm.name for alarm in raised}
            said = [f"alarm {alarm.name}: {alarm.text}" for alarm in new]
            return [step_line(event.step_finished), *said]
        if kind == "ladder_chosen":
            return [f"step {event.ladder_chosen.step} {printable(event.ladder_chosen.reason)}"]
        if kind == "run_changed" and (line := run_line(event.run_changed)) != self._run:
            self._run = line
            return [line]
        return []


def step_alarms(step: pb.Step) -> list[Alarm]:
    """The alarms that hold after a step."""
    found = (find_alarm(name) for name in sorted(step.metrics))
    return [alarm for alarm in found if alarm is not None]


def step_cells(step: pb.Step) -> list[str]:
    """A step as the cells of a row, in the order of STEP_TITLES."""
    kind = wire.round_kind_from_proto(step.round_kind).value
    return [
        str(step.step),
        kind,
        str(step.level),
        *(_number(step.metrics, column.metric, column.decimals) for column in COLUMNS),
    ]


def step_line(step: pb.Step) -> str:
    """A step as one line of words, for output that is no terminal."""
    cells = step_cells(step)
    pairs = zip(STEP_TITLES, cells, strict=True)
    return "  ".join(f"{title} {cell}" for title, cell in pairs if cell != "-")


def state_name(run: pb.Run) -> str:
    """running, stopping, succeeded, failed or stopped."""
    return pb.Run.State.Name(run.state).removeprefix("STATE_").lower()


def run_line(run: pb.Run) -> str:
    """A run's state as one line."""
    planned = f" of {run.planned_steps}" if run.planned_steps else ""
    line = (
        f"{run.run_id} {state_name(run)}: {run.step}{planned} steps,"
        f" weight version {run.weight_version}, {run.deferred_draw_count} draws deferred"
    )
    return f"{line}; {printable(run.failure)}" if run.failure else line


def progress_line(progress: pb.RoundProgress) -> str:
    """How far the round is, as one line."""
    if not progress.launched_group_count:  # between rounds, for example held-out evaluation
        return f"step {progress.step} {progress.phase}"
    kind = wire.round_kind_from_proto(progress.round_kind).value
    return (
        f"step {progress.step} ({kind}, level {progress.level}) {progress.phase}:"
        f" {progress.finished_group_count} of {progress.launched_group_count} groups finished,"
        f" {progress.kept_group_count} to keep"
    )


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as bars of text, the mean of neighbours where there are more than `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _number(metrics: Mapping[str, float], name: str, decimals: int) -> str:
    value = metrics.get(name)
    return "-" if value is None else f"{value:.{decimals}f}"
