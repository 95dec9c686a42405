"""Writes summary.json, report.html and trace.json of a run directory, from its other files.

With `write_comparison` the report also holds a comparison with another run; comparison.json keeps
it, so that a later `regenerate` shows it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.coordinator.outputs.comparison import compare_runs, read_comparison
from services.coordinator.outputs.loaded_run import load_run
from services.coordinator.outputs.report import build_report
from services.coordinator.outputs.run_directory import RunDirectory, to_json, write_atomic
from services.coordinator.outputs.summary import summarize
from services.coordinator.outputs.trace import build_trace


def regenerate(directory: Path) -> dict[str, Any]:
    """Derive the three files; returns the summary. Raises RunDirectoryError."""
    run = load_run(directory)
    summary = summarize(run)
    write_atomic(run.files.summary_file, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    write_atomic(run.files.trace_file, to_json(build_trace(run)) + "\n")
    write_atomic(run.files.report_file, build_report(run, summary, read_comparison(run.files)))
    return summary


def write_comparison(run_directory: Path, baseline_directory: Path) -> dict[str, Any]:
    """Compare a run with a baseline, add it to the run's report; returns the comparison.

    Raises RunDirectoryError.
    """
    comparison = compare_runs(run_directory, baseline_directory)
    target = RunDirectory(run_directory).comparison_file
    write_atomic(target, json.dumps(comparison, indent=2, allow_nan=False) + "\n")
    regenerate(run_directory)
    return comparison
