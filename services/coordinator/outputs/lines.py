"""The lines of metrics.jsonl and validation.jsonl: what is kept of a step and of a measurement.

A line is one flat JSON object. The fixed fields of a step come first, then its metrics, whose
names hold a slash (`reward/mean`). A number that is not finite is written as null, which reads
back as missing: every reader must live with a missing metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.types import StepRecord

VALIDATION_PREFIX = "validation/"


@dataclass(frozen=True, slots=True)
class StepLine:
    """One line of metrics.jsonl. Times are seconds since the Unix epoch."""

    step: int
    round_kind: str  # value of RoundKind
    level: int
    start_time: float  # start of the round
    rollout_end_time: float  # last accepted response
    end_time: float  # commit
    weight_version: int  # after the step
    trained_groups: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def metric(self, name: str) -> float | None:
        """A metric, or None where the step has none."""
        return self.metrics.get(name)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.metrics.get("timing_s/step", max(0.0, self.end_time - self.start_time))

    @property
    def rollout_seconds(self) -> float:
        """The round, up to the last accepted response."""
        measured = max(0.0, self.rollout_end_time - self.start_time)
        return self.metrics.get("timing_s/rollout", measured)


_STEP_FIELDS = frozenset(StepLine.__dataclass_fields__) - {"metrics"}


@dataclass(frozen=True, slots=True)
class ValidationLine:
    """One line of validation.jsonl: a held-out measurement after `step` optimizer updates."""

    step: int  # 0: the initial weights
    name: str  # which held-out set
    time: float  # seconds since the Unix epoch
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The value that headlines show: `accuracy`, else `reward`."""
        return self.values.get("accuracy", self.values.get("reward"))


def step_line(record: StepRecord) -> StepLine:
    """The line of a committed step. Raises ValueError for a metric named like a fixed field."""
    taken = _STEP_FIELDS & set(record.metrics)
    if taken:
        raise ValueError(
            f"metrics of step {record.step}: {sorted(taken)} are fixed fields of metrics.jsonl;"
            " name a metric with a slash, for example reward/mean"
        )
    return StepLine(
        step=record.step,
        round_kind=record.round_kind.value,
        level=record.level,
        start_time=record.start_time,
        rollout_end_time=record.rollout_end_time,
        end_time=record.end_time,
        weight_version=record.weight_version,
        trained_groups=len(record.draws),
        metrics={name: float(value) for name, value in record.metrics.items()},
    )


def step_line_to_json(line: StepLine) -> dict[str, Any]:
    """As it is written."""
    fixed = {
        name: getattr(line, name) for name in StepLine.__dataclass_fields__ if name != "metrics"
    }
    return fixed | {name: finite(value) for name, value in line.metrics.items()}


def step_line_from_json(row: Mapping[str, Any]) -> StepLine:
    """As it is read. Raises KeyError when a fixed field is missing."""
    fixed = {name: row[name] for name in _STEP_FIELDS}
    return StepLine(**fixed, metrics=_numbers(row, _STEP_FIELDS))


def validation_line_to_json(line: ValidationLine) -> dict[str, Any]:
    """As it is written."""
    values = {name: finite(value) for name, value in line.values.items()}
    return {"step": line.step, "name": line.name, "time": line.time, "values": values}


def validation_line_from_json(row: Mapping[str, Any]) -> ValidationLine:
    """As it is read. Raises KeyError when a field is missing."""
    values = _numbers(row["values"], frozenset())
    return ValidationLine(row["step"], row["name"], row["time"], values)


def measurements_in(line: StepLine) -> dict[str, float]:
    """The step's own `validation/...` metrics, without the prefix."""
    return {
        name.removeprefix(VALIDATION_PREFIX): value
        for name, value in line.metrics.items()
        if name.startswith(VALIDATION_PREFIX)
    }


def finite(value: float) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


def _numbers(row: Mapping[str, Any], without: frozenset[str]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in without and isinstance(value, int | float)
    }
