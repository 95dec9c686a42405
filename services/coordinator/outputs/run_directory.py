"""The places of a run's files, and the only ways in which they change.

A file is either replaced (written aside, synced, renamed) or, when it holds lines, appended to in
one write. So a reader sees whole files; only the last line of a JSONL file can be torn, by a crash
in the middle of its write. Readers skip a torn line and the next append removes it.

Lines of one file are in the order of their `step`; dropping the lines from a step on is how a
repeat or a rewind stays free of duplicates. One process writes a run directory at a time.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_SAMPLES_NAME = re.compile(r"step_(\d+)\.jsonl")


class RunDirectoryError(Exception):
    """The directory is not what it should be; the message says what to do."""


class RunDirectory:
    """Where each output of a run lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.json"
        self.metrics = LineFile(path / "metrics.jsonl")
        self.validation = LineFile(path / "validation.jsonl")
        self.samples = path / "samples"
        self.superseded = path / "superseded"
        self.tensorboard = path / "tensorboard"
        self.summary_file = path / "summary.json"
        self.report_file = path / "report.html"
        self.trace_file = path / "trace.json"
        self.comparison_file = path / "comparison.json"

    def samples_file(self, step: int) -> Path:
        """The samples of one step."""
        return self.samples / f"step_{step:06d}.jsonl"

    def round_file(self, step: int) -> Path:
        """The log of one round."""
        return self.path / "rounds" / f"step_{step:06d}.jsonl"

    def regraded_file(self, regrade_id: str, step: int) -> Path:
        """The scores that a regrade gave to the samples of one step."""
        return self.path / "regraded" / regrade_id / f"step_{step:06d}.jsonl"

    def sampled_steps(self) -> list[int]:
        """Steps that have a samples file, in order."""
        if not self.samples.is_dir():
            return []
        matches = (_SAMPLES_NAME.fullmatch(entry.name) for entry in self.samples.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def supersede_samples(self, step: int) -> Path:
        """Move the samples of a step aside, never over older ones. Returns the new place."""
        self.superseded.mkdir(exist_ok=True)
        source = self.samples_file(step)
        target, count = self.superseded / source.name, 1
        while target.exists():
            count += 1
            target = self.superseded / f"{source.stem}.{count}.jsonl"
        source.rename(target)
        return target

    def supersede_lines(self, file: LineFile, step: int) -> None:
        """Move the lines of steps >= `step` aside, behind older ones. After a crash in between
        they stand there twice."""
        aside = LineFile(self.superseded / file.path.name)
        for row in file.read():
            if row["step"] >= step:
                aside.append(row)
        file.drop_from(step)


class LineFile:
    """A JSONL file of objects with a `step`, in the order of their steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. Raises RunDirectoryError when one before the last is not JSON."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn
        return [self._parse(line, number) for number, line in enumerate(lines, start=1)]

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line in one write; a torn line at the end goes first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            _cut_torn_line(file)
            file.write(to_json(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def newest_step(self) -> int | None:
        """The step of the last line, or None."""
        rows = self.read()
        return int(rows[-1]["step"]) if rows else None

    def drop_from(self, step: int) -> None:
        """Remove the lines of steps >= `step`."""
        rows = self.read()
        kept = [row for row in rows if row["step"] < step]
        if len(kept) < len(rows):
            self.replace(kept)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the whole file anew."""
        write_atomic(self.path, "".join(to_json(row) + "\n" for row in rows))

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            row = error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise RunDirectoryError(
                f"{self.path}, line {number}: not an object with a `step`; restore the line or"
                " delete it"
            )
        return row


def _cut_torn_line(file: BinaryIO) -> None:
    """Remove what follows the last newline."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without loading all of it."""
    with path.open("rb") as file:
        yield from file


def write_atomic(path: Path, content: str) -> None:
    """Replace a file: readers see the old content or the new one, also after a crash.

    Several may write at the same time; the last one stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.writing")
    try:
        with aside.open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)  # there only after a failure


def to_json(value: Any) -> str:
    """Compact JSON in ASCII; refuses numbers that JSON cannot hold."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. Raises RunDirectoryError when it is missing or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{path} is missing: {path.parent} is not the directory of a run; give runs/<run_id>"
        ) from error
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not JSON: {error}; restore it") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} does not hold an object; restore it")
    return value
