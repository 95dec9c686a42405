"""The selection weights of a real run, computed again from the logs of its rounds; and how its
responses changed from launch to launch, by the drafts that the engines verified.

Logs and samples hold all that a weight is computed from. So of a run of this version the same
weights must come out, to the last bit; and if responses change as they are foretold to, groups that
were deferred count 1 on average (`policy.selection_weights`). Rounds that did not weigh are left
out of the means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.policy.events import ResponseFinished
from rollpacker.policy.ladder_memory import LadderMemory, remembered, selection_at
from rollpacker.policy.response_drift import octave
from rollpacker.policy.selection_weights import WeighedSums
from rollpacker.simulation.recorded_steps import RecordedStep, run_values
from rollpacker.types import DeferredDraw, DrawId, LostRace

_MIN_RESPONSES = 30  # of a row of how responses change


def weight_rows(directory: Path, steps: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    """Whether the run gave its groups the same weights, and what they are on average; nothing of a
    run that never weighs."""
    if not any(step.logged.arguments.rules.selection_weights for step in steps):
        return
    remembers = run_values(directory).get("mode") == "auto"
    written = _written(directory)
    memory = LadderMemory()
    lost: dict[DrawId, LostRace] = {}
    all_, again = WeighedSums(), WeighedSums()
    differences = 0
    for recorded in steps:
        seen, finish = recorded.seen, recorded.finish
        weighs = recorded.logged.arguments.rules.selection_weights
        selection = selection_at(memory, seen.step, lost)
        for group in seen.trained:
            weight = selection.weight(group.draw, group.response_tokens) if weighs else 1.0
            differences += written.get((seen.step, group.draw)) != weight
            if weighs:
                all_ = all_.plus(weight, group.response_tokens)
            if weighs and group.draw in lost:
                again = again.plus(weight, group.response_tokens)
        deferred = selection.after_race(finish.deferred, finish.cuts)
        lost |= {item.draw.id: item.lost for item in deferred if item.lost is not None}
        if remembers or weighs:
            memory = remembered(memory, seen)
    yield {
        "figure": "selection_weights",
        "groups": int(all_.groups),
        "deferred_groups": int(again.groups),
        "mean_weight": round(all_.mean_weight, 4),
        "mean_weight_of_deferred": round(again.mean_weight, 4),
        "zero_weight_share": round(all_.zero_weight_share, 4),
        "effective_share": round(all_.effective_share, 4),
        "differences": differences,
    }


def _written(directory: Path) -> dict[tuple[int, DrawId], float]:
    """The weights in the samples' files, by step and draw."""
    found: dict[tuple[int, DrawId], float] = {}
    for path in sorted((directory / "samples").glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            draw = DrawId(row["draw"]["epoch"], row["draw"]["prompt_id"])
            found[row["step"], draw] = row["group"].get("selection_weight", 1.0)  # older: none
    return found


@dataclass(slots=True)
class _Changes:
    """Of drafts of about the same length, verified after as many updates."""

    responses: int = 0
    unchanged: int = 0
    tokens: int = 0  # accepted


def drift_rows(directory: Path, steps: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    """Of groups that a round trains, by updates since their last launch and length of the draft,
    how many drafts came out again; nothing where too few were verified."""
    settings = run_values(directory).get("settings", {}).get("tail_batching", {})
    longest_draft = settings.get("carry_over_max_tokens", math.inf)
    found: dict[tuple[int, int], _Changes] = {}
    before: dict[DrawId, tuple[int, DeferredDraw]] = {}
    for recorded in steps:
        seen = recorded.seen
        ended: dict[DrawId, dict[int, ResponseFinished]] = {}
        for event in (handled.event for handled in recorded.logged.handled):
            if isinstance(event, ResponseFinished):
                ended.setdefault(event.draw, {})[event.index] = event
        for group in seen.trained:
            if group.draw not in before or group.draw in seen.moved or not group.carried_tokens:
                continue  # without carried tokens the engine may have had no draft
            last, item = before[group.draw]
            for index, event in ended.get(group.draw, {}).items():
                draft = min(item.response_tokens[index], longest_draft)
                if not draft:
                    continue
                changes = found.setdefault((seen.step - last, octave(draft)), _Changes())
                changes.responses += 1
                changes.unchanged += event.carried_tokens >= min(draft, event.tokens)
                changes.tokens += event.carried_tokens
        before |= {item.draw.id: (seen.step, item) for item in seen.deferred}
    for (updates, size), changes in sorted(found.items()):
        if updates and changes.responses >= _MIN_RESPONSES:
            changed = changes.responses - changes.unchanged
            yield {
                "figure": "response_drift",
                "updates": updates,
                "tokens": 1 << size,
                "responses": changes.responses,
                "unchanged_share": round(changes.unchanged / changes.responses, 3),
                "changes_per_1000_tokens": round(1000 * changed / max(1, changes.tokens), 2),
            }
