"""`RunOutputs`: what the coordinator calls after each committed step, and at the end.

A step's outputs are complete when its line stands in metrics.jsonl, which is written last. Until
`write_step` has returned the coordinator keeps the step's groups, so that it can repeat the call.

Invariants: metrics.jsonl and samples/ hold every step at most once, in order, and the same steps;
a repeat replaces; a rewind moves what it takes back to superseded/. Nothing is ever overwritten
there. All calls block on the disk; an asyncio caller uses a thread, one call at a time.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.observability.metric_names import with_aliases
from rollpacker.types import PromptGroup, StepRecord
from services.coordinator.outputs.lines import (
    ValidationLine,
    step_line,
    step_line_to_json,
    validation_line_from_json,
    validation_line_to_json,
)
from services.coordinator.outputs.regenerate import regenerate
from services.coordinator.outputs.run_directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    to_json,
    write_atomic,
)
from services.coordinator.outputs.samples import group_to_lines, read_groups
from services.coordinator.outputs.tensorboard import EventLog
from services.coordinator.outputs.trackers import TrackedRun, Trackers

_VALIDATION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_step_samples(directory: Path, step: int) -> list[PromptGroup] | None:
    """The trained groups of a step, in the order of the update; None when there are none.

    directory: of the run. Raises RunDirectoryError when the samples cannot be read.
    """
    path = RunDirectory(directory).samples_file(step)
    return read_groups(path) if path.exists() else None


class RunOutputs:
    """The outputs of one run, in one directory."""

    def __init__(
        self, directory: Path, run_id: str, mode: str, settings: Mapping[str, Any]
    ) -> None:
        """Open the directory, new or of an earlier part of the same run.

        settings: the resolved run settings, as JSON values.
        Raises RunDirectoryError when the directory belongs to another run, or when a tracker that
        the settings name is not installed.
        """
        self._files = RunDirectory(directory)
        create_time: float | None = None
        if self._files.run_file.exists():
            before = read_json(self._files.run_file)
            owner, create_time = before.get("run_id"), before.get("create_time")
            if owner != run_id:
                raise RunDirectoryError(
                    f"{directory} holds run {owner!r}, not {run_id!r}; move it aside"
                )
        self._run = {"run_id": run_id, "mode": mode, "settings": dict(settings)}
        self._write_run_file(create_time)
        self._run_id = run_id
        self._newest_step = self._files.metrics.newest_step()
        self._train_log = EventLog(self._files.tensorboard / "train")
        self._validation_logs: dict[str, EventLog] = {}
        self._trackers = Trackers(TrackedRun(run_id, directory, settings))

    def begin(self, create_time: float) -> None:
        """Say which run goes on here, by the time when it was first started (seconds since the
        epoch). What another run of the same id has left moves to superseded/. Repeat: no effect."""
        before = read_json(self._files.run_file).get("create_time")
        if before not in (None, create_time):
            self.supersede_from(-1)
        self._write_run_file(create_time)

    def _write_run_file(self, create_time: float | None) -> None:
        known = {} if create_time is None else {"create_time": create_time}
        write_atomic(self._files.run_file, to_json(self._run | known) + "\n")

    def write_step(self, record: StepRecord, groups: Sequence[PromptGroup]) -> None:
        """Write the outputs of a committed step; a repeat replaces them.

        Outputs of later steps, left by a part of the run that was rewound, are superseded.
        Raises ValueError when the groups are not those of the record.
        """
        self._check(record, groups)
        if self._newest_step is not None and self._newest_step >= record.step:
            self.supersede_from(record.step + 1)
            self._files.metrics.drop_from(record.step)
        lines = [line + "\n" for group in groups for line in group_to_lines(group)]
        write_atomic(self._files.samples_file(record.step), "".join(lines))
        line = step_line(record)
        line = dataclasses.replace(line, metrics=with_aliases(line.metrics))
        self._train_log.write(line.step, line.end_time, line.metrics)
        self._trackers.write(line.step, line.end_time, line.metrics)
        self._files.metrics.append(step_line_to_json(line))
        self._newest_step = record.step

    def write_round(self, step: int, lines: Sequence[str]) -> None:
        """Write what a round was told and asked for (`rollpacker.round_log`); a repeat replaces."""
        write_atomic(self._files.round_file(step), "".join(line + "\n" for line in lines))

    def supersede_from(self, step: int) -> None:
        """The run goes on from `step`: move the outputs of it and of later steps to superseded/.

        Measurements of the weights after more than `step` updates go with them. Repeat: no effect.
        """
        for sampled in self._files.sampled_steps():
            if sampled >= step:
                self._files.supersede_samples(sampled)
        self._files.supersede_lines(self._files.metrics, step)
        self._files.supersede_lines(self._files.validation, step + 1)
        self._newest_step = self._files.metrics.newest_step()

    def write_validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """Record a held-out measurement of the weights after `step` updates; a repeat replaces.

        name: the held-out set, 1 to 64 of A-Z, a-z, 0-9, dot, - and _.
        values: `accuracy` (0 to 1) is what headlines show, `count` the responses behind it.
        """
        if not _VALIDATION_NAME.fullmatch(name):
            raise ValueError(
                f"name: {name!r} is not 1 to 64 of A-Z, a-z, 0-9, dot, - and _, starting with a"
                " letter or digit"
            )
        numbers = {key: float(value) for key, value in values.items()}
        line = ValidationLine(step, name, time.time(), numbers)
        kept = [
            row
            for row in self._files.validation.read()
            if (row["step"], row["name"]) != (step, name)
        ]
        kept.append(validation_line_to_json(line))
        self._files.validation.replace(sorted(kept, key=lambda row: int(row["step"])))
        log = self._validation_logs.setdefault(
            name, EventLog(self._files.tensorboard / f"validation-{name}")
        )
        log.write(step, line.time, {f"validation/{key}": numbers[key] for key in numbers})
        tracked = {f"validation/{name}/{key}": value for key, value in numbers.items()}
        self._trackers.write(step, line.time, tracked)

    def validation_values(self, step: int, name: str) -> Mapping[str, float] | None:
        """What was measured of the weights after `step` updates on this set; None: nothing."""
        lines = map(validation_line_from_json, self._files.validation.read())
        return next((line.values for line in lines if (line.step, line.name) == (step, name)), None)

    def has_validation(self, step: int, name: str) -> bool:
        """Whether the weights after `step` updates were measured on this held-out set."""
        return self.validation_values(step, name) is not None

    def finish(self) -> dict[str, Any]:
        """Write summary.json, report.html and trace.json from the files; returns the summary.

        May be called at any time and any number of times.
        """
        self._trackers.close()
        return regenerate(self._files.path)

    def _check(self, record: StepRecord, groups: Sequence[PromptGroup]) -> None:
        trained = [group.draw.id for group in groups]
        if trained != [draw.id for draw in record.draws]:
            raise ValueError(
                f"step {record.step}: the record names {len(record.draws)} draws, the"
                f" {len(groups)} groups hold others or another order; pass the trained groups in"
                " the order of the record"
            )
        for group in groups:
            if (group.run_id, group.step) != (self._run_id, record.step):
                raise ValueError(
                    f"group {group.draw.id} belongs to step {group.step} of run {group.run_id!r},"
                    f" not to step {record.step} of {self._run_id!r}"
                )
