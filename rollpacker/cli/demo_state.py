"""What the demo remembers between two calls: which runs, with which settings, and which finished.

`<runs>/.demo/` holds the demo's stack (Redis data, weights, checkpoints, logs) and `demo.json`.
A demo is *resumed* while a wanted run of it is unfinished and the settings are the same;
otherwise everything of it is moved aside: `.demo` to `.demo.1`, `demo` to `demo.1` and so on, the
first number that is free for all of them. Nothing is ever deleted or overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STACK = ".demo"


class DemoState:
    """The demo below one directory of runs."""

    def __init__(self, runs: Path, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """`settings` is what each run id is to be started with, as JSON values."""
        self._runs = runs
        self._settings = json.loads(json.dumps(settings))
        self._finished: list[str] = []
        self.stack_directory = runs / STACK
        self._file = self.stack_directory / "demo.json"

    def open(self, wanted: Sequence[str]) -> str:
        """Resume the demo or begin a new one; returns a sentence about which.

        `wanted`: the runs of this call. Raises OSError when something cannot be moved.
        """
        found = self._read()
        if found is None and not self._leftovers():
            self._write()
            return "a new demo"
        if found is not None and found["settings"] == self._settings:
            self._finished = list(found["finished"])
            if not set(wanted) <= set(self._finished):
                return "resuming the demo from its last committed step"
            why = "the finished demo"
        else:
            why = "a demo with other settings"
        number = self._move_aside()
        self._finished = []
        self._write()
        return f"a new demo; {why} was moved to {self._runs}/*.{number}"

    def finish(self, run_id: str) -> None:
        """Remember that a run has reached its end."""
        if run_id not in self._finished:
            self._finished.append(run_id)
        self._write()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        known = isinstance(found, dict) and {"settings", "finished"} <= set(found)
        return found if known else None

    def _write(self) -> None:
        self.stack_directory.mkdir(parents=True, exist_ok=True)
        state = {"settings": self._settings, "finished": self._finished}
        aside = self._file.with_suffix(".tmp")
        aside.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        aside.replace(self._file)

    def _leftovers(self) -> list[str]:
        """Names that a new demo would collide with."""
        return [name for name in (STACK, *self._settings) if (self._runs / name).exists()]

    def _move_aside(self) -> int:
        """Raises OSError."""
        names = (STACK, *self._settings)
        number = 1
        while any((self._runs / f"{name}.{number}").exists() for name in names):
            number += 1
        for name in self._leftovers():
            (self._runs / name).rename(self._runs / f"{name}.{number}")
        return number
