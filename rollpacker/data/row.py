"""One row of a source as it was read, and how to complain about it.

A column may be dotted: `reward_model.ground_truth` is the key `ground_truth` of the object in the
column `reward_model`. A name with dots of its own is found first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.data.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a source."""

    path: Path  # of the source, as the settings name it
    number: int  # from 1; in JSONL the line
    values: Mapping[str, Any]

    def get(self, column: str) -> Any:
        """The value of a column; None where it is missing, null or lies in no object."""
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for key in column.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def error(self, column: str, problem: str) -> DataError:
        return DataError(self.path, problem, row=self.number, field=column)

    def missing(self, column: str, need: str) -> DataError:
        """The error for a value that is needed and not there. need: what it should be."""
        there = ", ".join(sorted(map(str, self.values))) or "none"
        state = "is null" if column in self.values else f"is missing (columns: {there})"
        return self.error(column, f"{state}; {need}")
