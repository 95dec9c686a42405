"""A run against a baseline: the same figures of both, their ratios, and what makes them unfair.

A ratio is always run / baseline: below 1 is faster for times, above 1 is faster for tokens per
second. Notes name every difference between the two runs that a reader must know to trust a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from services.coordinator.outputs.formatting import format_number, format_ratio, format_score
from services.coordinator.outputs.loaded_run import LoadedRun, load_run
from services.coordinator.outputs.run_directory import RunDirectory, read_json
from services.coordinator.outputs.summary import summarize, trained_tokens

# Figure -> (words for people, unit). The first five have ratios.
FIGURES = {
    "step_seconds_mean": ("step time, mean", "s"),
    "rollout_seconds_mean": ("rollout time, mean", "s"),
    "trained_tokens_per_second": ("trained tokens per second", ""),
    "wall_seconds": ("wall time, first round to last commit", "s"),
    "response_tokens_mean": ("trained response, mean length", "tokens"),
    "steps": ("steps", ""),
    "trained_responses": ("trained responses", ""),
    "waste": ("generated / trained tokens", ""),
    "undrained": ("draws left in the queue", ""),
    "validation_before": ("held-out score, before", ""),
    "validation_after": ("held-out score, after", ""),
}
RATIOS = tuple(FIGURES)[:5]


def compare_runs(run_directory: Path, baseline_directory: Path) -> dict[str, Any]:
    """Figures of both runs, ratios run / baseline, notes. Raises RunDirectoryError."""
    run = _figures(load_run(run_directory))
    baseline = _figures(load_run(baseline_directory))
    return {
        "run": run,
        "baseline": baseline,
        "ratios": _ratios(run, baseline),
        "notes": _notes(run, baseline),
    }


def read_comparison(files: RunDirectory) -> dict[str, Any] | None:
    """The comparison that `write_comparison` left in the directory, if any."""
    return read_json(files.comparison_file) if files.comparison_file.exists() else None


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """The comparison for a terminal; its caption holds the notes."""
    run, baseline = comparison["run"], comparison["baseline"]
    table = Table(
        title=f"{run['run_id']} against {baseline['run_id']}",
        caption="\n".join(comparison["notes"]),
        caption_justify="left",
    )
    table.add_column("")
    table.add_column(run["mode"], justify="right")
    table.add_column(baseline["mode"], justify="right")
    table.add_column("ratio", justify="right")
    for name, (words, _) in FIGURES.items():
        ratio = comparison["ratios"].get(name)
        table.add_row(
            words,
            format_figure(name, run[name]),
            format_figure(name, baseline[name]),
            "" if ratio is None else format_ratio(ratio),
        )
    return table


def format_figure(name: str, value: float | None) -> str:
    """A figure of FIGURES with its unit."""
    if name.startswith("validation_"):
        return format_score(value)
    return format_number(value, FIGURES[name][1])


def _figures(run: LoadedRun) -> dict[str, Any]:
    summary = summarize(run)
    lengths = run.all_lengths
    wall = run.steps[-1].end_time - run.steps[0].start_time if run.steps else None
    return {
        "run_id": run.run_id,
        "mode": run.mode,
        "wall_seconds": wall,
        "outside_steps_seconds": None if wall is None else max(0.0, wall - _step_seconds(run)),
        "response_tokens_mean": _ratio(trained_tokens(run), lengths.total()),
        "trained_responses": lengths.total(),
    } | {name: summary[name] for name in FIGURES if name in summary}


def _ratios(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    """Wall times have a ratio only when both runs did the same work."""
    ratios = {name: _ratio(run[name], baseline[name]) for name in RATIOS}
    if run["trained_responses"] != baseline["trained_responses"]:
        ratios["wall_seconds"] = None
    return ratios


def _step_seconds(run: LoadedRun) -> float:
    return math.fsum(line.seconds for line in run.steps)


def _notes(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """What a reader must know to trust the ratios."""
    notes = ["Ratios are run / baseline."]
    if run["trained_responses"] != baseline["trained_responses"]:
        notes.append(
            f"The wall times cover {run['steps']} and {baseline['steps']} steps, so they have no"
            " ratio; compare times per step, or tokens per second."
        )
    if min(run["steps"], baseline["steps"]) < 10:
        notes.append("Fewer than ten steps: the ratios are noisy.")
    length = _ratio(run["response_tokens_mean"], baseline["response_tokens_mean"])
    if length is not None and abs(length - 1) > 0.02:
        notes.append(
            f"Trained responses are {format_ratio(length)} as long as the baseline's: tokens per"
            " second is fair, time per step is not."
        )
    for side in (run, baseline):
        if side["undrained"]:
            notes.append(
                f"{side['run_id']} left {side['undrained']} draws in the queue; they are long ones,"
                " and their time is not counted."
            )
        outside = _ratio(side["outside_steps_seconds"], side["wall_seconds"])
        if outside is not None and outside > 0.1:
            notes.append(
                f"{outside:.0%} of the wall time of {side['run_id']} lies between steps"
                " (validation, pauses)."
            )
    return notes


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
