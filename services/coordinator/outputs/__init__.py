"""The outputs of a run: what is written while it runs, and what is derived from that.

Written by `RunOutputs` after each committed step: `metrics.jsonl`, `samples/`, `validation.jsonl`,
`tensorboard/`, `run.json`. Derived from those at the end, or again by
`python -m services.coordinator.outputs RUN_DIR`: `summary.json`, `report.html`, `trace.json`.
docs/outputs.md describes each file.

No output decides anything: Redis is the commit point, and a run whose directory is deleted goes on.
"""

from services.coordinator.outputs.comparison import compare_runs, comparison_table
from services.coordinator.outputs.regenerate import regenerate, write_comparison
from services.coordinator.outputs.run_directory import RunDirectoryError
from services.coordinator.outputs.run_outputs import (
    RunOutputs,
    read_step_samples,
)

__all__ = [
    "RunDirectoryError",
    "RunOutputs",
    "compare_runs",
    "comparison_table",
    "read_step_samples",
    "regenerate",
    "write_comparison",
]
