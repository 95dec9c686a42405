"""How a step's time is divided: the one division that report and trace share.

The phases of a step follow each other and lie within it: apply weights, round, train wait, commit.
What lies between them is the coordinator's own work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.coordinator.outputs.lines import StepLine

APPLY_WEIGHTS, ROUND, TRAIN_WAIT, COMMIT = "apply weights", "round", "train wait", "commit"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Times are seconds since the Unix epoch."""

    name: str
    start: float
    end: float
    arguments: dict[str, Any] = field(default_factory=dict)


def phase_spans(line: StepLine) -> list[Span]:
    """The phases of a step, in order; those that it did not report, or that took no time, not."""
    applied = min(line.start_time + line.metrics.get("timing_s/apply_weights", 0.0), line.end_time)
    rolled = min(max(line.rollout_end_time, applied), line.end_time)
    committing = max(line.end_time - line.metrics.get("timing_s/commit", 0.0), rolled)
    waited = min(rolled + line.metrics.get("timing_s/train_wait", 0.0), committing)
    spans = [
        Span(APPLY_WEIGHTS, line.start_time, applied),
        Span(ROUND, applied, rolled, {"step": line.step, "round_kind": line.round_kind}),
        Span(TRAIN_WAIT, rolled, waited),
        Span(COMMIT, committing, line.end_time),
    ]
    return [span for span in spans if span.end > span.start]
