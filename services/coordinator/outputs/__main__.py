"""`python -m services.coordinator.outputs RUN_DIR [BASELINE_DIR]`: derive a run's outputs again.

Writes summary.json, report.html and trace.json from metrics.jsonl and samples/. With a second
directory the report also compares the run with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from services.coordinator.outputs.comparison import comparison_table
from services.coordinator.outputs.regenerate import regenerate, write_comparison
from services.coordinator.outputs.run_directory import RunDirectory, RunDirectoryError


def main() -> int:
    """Exit status: 0, or 1 when a directory is not that of a run."""
    parser = argparse.ArgumentParser(prog="python -m services.coordinator.outputs")
    parser.add_argument("run_directory", type=Path, help="for example runs/demo")
    parser.add_argument("baseline_directory", type=Path, nargs="?", help="a run to compare with")
    arguments = parser.parse_args()
    console = Console()
    try:
        if arguments.baseline_directory:
            comparison = write_comparison(arguments.run_directory, arguments.baseline_directory)
            console.print(comparison_table(comparison))
        else:
            regenerate(arguments.run_directory)
    except RunDirectoryError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    console.print(str(RunDirectory(arguments.run_directory).report_file), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
