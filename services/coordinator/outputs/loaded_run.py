"""A run read back from its files: the only input of summary, report and trace.

Samples of a step without a line in metrics.jsonl (a crash came between) are left out. Response
lengths of the whole run are held as counts per length and kind of round, so that memory does not
grow with the number of responses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from services.coordinator.outputs.lines import (
    StepLine,
    ValidationLine,
    measurements_in,
    step_line_from_json,
    validation_line_from_json,
)
from services.coordinator.outputs.run_directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
)
from services.coordinator.outputs.samples import ResponseRow, scan

NOT_SCORED = "NOT SCORED"
OWN_VALIDATION = "validation"  # name of measurements that stand in the step's own metrics
_KIND_ORDER = {"short": 0, "long": 1, "drain": 2}


class RoundClass(NamedTuple):
    """Rounds that are scheduled alike: what charts colour by."""

    kind: str  # value of RoundKind
    level: int

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.kind}, level {self.level}" if self.kind == "short" else self.kind

    @property
    def sort_key(self) -> tuple[int, int]:
        return (_KIND_ORDER.get(self.kind, len(_KIND_ORDER)), self.level)


@dataclass(frozen=True)
class LoadedRun:
    """What the files say about a run."""

    files: RunDirectory
    run_id: str
    mode: str
    settings: Mapping[str, Any]
    steps: tuple[StepLine, ...]  # in order
    validations: tuple[ValidationLine, ...]  # in order of step
    lengths: Mapping[RoundClass, Counter[int]]  # tokens of trained responses -> how many
    verdicts: Mapping[int, Counter[str]]  # step -> verdicts of its trained responses

    def responses(self, step: int) -> Iterator[ResponseRow]:
        """The trained responses of a step; none when its samples are gone."""
        return _scan_step(self.files, step)

    @property
    def all_lengths(self) -> Counter[int]:
        """Lengths of all trained responses, in tokens."""
        return sum(self.lengths.values(), Counter())

    def sum_of(self, name: str) -> float | None:
        """A metric summed over the steps that have it, or None."""
        values = self.values_of(name)
        return math.fsum(values) if values else None

    def last_of(self, name: str) -> float | None:
        """The newest value of a metric, or None."""
        values = self.values_of(name)
        return values[-1] if values else None

    def values_of(self, name: str) -> list[float]:
        """A metric in the order of the steps, without those that lack it."""
        return [line.metrics[name] for line in self.steps if name in line.metrics]


class SampleCounts:
    """Lengths by kind of round and verdicts by step, counted over the samples.

    Steps that were counted before are not read again, unless one of them was written anew.
    """

    def __init__(self) -> None:
        self._counted: dict[int, float] = {}  # step -> its commit
        self.lengths: dict[RoundClass, Counter[int]] = {}
        self.verdicts: dict[int, Counter[str]] = {}

    def take(self, files: RunDirectory, steps: Iterable[StepLine]) -> None:
        """Count what is new."""
        times = {line.step: line.end_time for line in steps}
        if any(times.get(step) != time for step, time in self._counted.items()):
            self._counted, self.lengths, self.verdicts = {}, {}, {}
        for line in steps:
            if line.step not in self._counted:
                self._add(line, list(_scan_step(files, line.step)))

    def _add(self, line: StepLine, rows: list[ResponseRow]) -> None:
        self._counted[line.step] = line.end_time
        if rows:
            counts = self.lengths.setdefault(round_class(line), Counter())
            counts.update(row.token_count for row in rows)
            self.verdicts[line.step] = Counter(row.verdict or NOT_SCORED for row in rows)


def load_run(directory: Path, counts: SampleCounts | None = None) -> LoadedRun:
    """Read a run directory; `counts` of an earlier reading save most of it.

    Raises RunDirectoryError.
    """
    files = RunDirectory(directory)
    run = read_json(files.run_file)
    try:
        steps = tuple(step_line_from_json(row) for row in files.metrics.read())
        measured = [validation_line_from_json(row) for row in files.validation.read()]
    except KeyError as error:
        raise RunDirectoryError(
            f"{directory}: a line of metrics.jsonl or validation.jsonl lacks {error}; restore it"
        ) from error
    counts = counts or SampleCounts()
    counts.take(files, steps)
    return LoadedRun(
        files=files,
        run_id=str(run.get("run_id", directory.name)),
        mode=str(run.get("mode", "")),
        settings=run.get("settings", {}),
        steps=steps,
        validations=tuple(_with_own(measured, steps)),
        lengths=dict(sorted(counts.lengths.items(), key=lambda item: item[0].sort_key)),
        verdicts=counts.verdicts,
    )


def round_class(line: StepLine) -> RoundClass:
    """How the step's round was scheduled."""
    return RoundClass(line.round_kind, line.level if line.round_kind == "short" else 0)


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """Nearest-rank percentile of counted values: an observed one. None without values."""
    rank = max(1, math.ceil(share * sum(counts.values())))
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    return None


def mean_of(values: Iterable[float]) -> float | None:
    """Arithmetic mean, or None without values."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def _with_own(measured: list[ValidationLine], steps: Iterable[StepLine]) -> list[ValidationLine]:
    """Adds measurements that only stand in a step's metrics: its weights had step + 1 updates."""
    known = {line.step for line in measured}
    for line in steps:
        values = measurements_in(line)
        if values and line.step + 1 not in known:
            measured.append(ValidationLine(line.step + 1, OWN_VALIDATION, line.end_time, values))
    return sorted(measured, key=lambda line: line.step)


def _scan_step(files: RunDirectory, step: int) -> Iterator[ResponseRow]:
    path = files.samples_file(step)
    return scan(path) if path.exists() else iter(())
