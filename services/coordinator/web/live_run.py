"""The files of a run as they grow: read again when a step is new, and then only what is new.

Reading and drawing block on disk and processor, so they happen in a thread, one at a time per run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from markupsafe import Markup

from services.coordinator.outputs import charts, round_charts
from services.coordinator.outputs.loaded_run import LoadedRun, SampleCounts, load_run
from services.coordinator.outputs.report import SCHEDULING_CURVES, TRAINER_CURVES, headline_figures
from services.coordinator.outputs.run_directory import RunDirectory
from services.coordinator.outputs.slot_chart import slot_chart
from services.coordinator.outputs.summary import summarize


class LiveRun:
    """One run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counts = SampleCounts()
        self._lock = asyncio.Lock()
        self._seen: tuple[int, ...] = ()
        self._run: LoadedRun | None = None
        self._overview: dict[str, object] = {}

    async def overview(self) -> dict[str, object]:
        """Headline figures and pictures of the whole run. Raises RunDirectoryError."""
        async with self._lock:
            return await asyncio.to_thread(self._draw)

    async def round_picture(self, step: int) -> Markup:
        """The round of a step; empty where it is not known. Raises RunDirectoryError."""
        async with self._lock:
            return await asyncio.to_thread(self._draw_round, step)

    def _draw(self) -> dict[str, object]:
        if self._refresh() or not self._overview:
            run = self._loaded()
            self._overview = _overview(run)
        return self._overview

    def _draw_round(self, step: int) -> Markup:
        self._refresh()
        run = self._loaded()
        line = next((line for line in reversed(run.steps) if line.step == step), None)
        return Markup("") if line is None else slot_chart(line, list(run.responses(step)))

    def _refresh(self) -> bool:
        """Read the files if they have changed; whether they have."""
        files = RunDirectory(self._directory)
        paths = (files.metrics.path, files.validation.path)
        seen = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
        if self._run is not None and seen == self._seen:
            return False
        self._run, self._seen = load_run(self._directory, self._counts), seen
        return True

    def _loaded(self) -> LoadedRun:
        assert self._run is not None, "_refresh loads it"
        return self._run


def _overview(run: LoadedRun) -> dict[str, object]:
    figures = headline_figures(run, summarize(run))
    kinds = [(charts.round_css(kind), kind.label) for kind in run.lengths]
    return {
        "figures": [{"name": f.name, "value": f.value, "note": f.note} for f in figures],
        "kinds": [{"css": css, "label": label} for css, label in kinds],
        "reward": charts.reward_chart(run, width=1100, height=280),
        "timeline": round_charts.timeline_chart(run),
        "histogram": round_charts.length_histogram(run),
        "lengths": round_charts.length_chart(run),
        "curves": [
            {"title": title, "note": note, "picture": charts.small_chart(run, name, reference)}
            for name, title, note, reference in (*SCHEDULING_CURVES, *TRAINER_CURVES)
            if run.last_of(name) is not None
        ],
        "last_step": run.steps[-1].step if run.steps else None,
    }
