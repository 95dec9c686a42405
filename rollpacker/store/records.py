"""What Redis keeps of a run, as values, and their JSON.

`RunState` is the commit point of a run: together with the weights that it names and the data set,
it determines everything that follows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.types import DeferredDraw, Draw, LostRace, RoundKind, StepRecord

# 2: a run remembers its rounds for mode auto (`ladder_memory`); one of layout 1 remembers none yet.
# 3: and its engines by their size; one of layout 2 does not know whose speed it has.
# 4: and what is known of first launches; one of layout 3 goes on as if all came out as they were.
#    Mode auto begins with another ladder: one of layout 3 keeps its own until it chooses.
# 5: and which graders its groups have, and what a reward costs; one of layout 4 does not know yet.
# 6: and which races its deferred draws have lost; one of layout 5 counts them 1.
LAYOUT_VERSION = 6
_OLD_START = {"deferral_levels": 3, "speculation_factors": [2.0, 2.0, 2.0]}  # below layout 4
READABLE_LAYOUTS = (1, 2, 3, 4, 5, 6)
READABLE = ", ".join(map(str, READABLE_LAYOUTS))  # in messages


class LayoutError(ValueError):
    """A state was written by a version whose layout this one cannot read."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the committed steps of a run."""

    trained_tokens: int = 0
    generated_tokens: int = 0
    deferrals: int = 0  # draws put into the queue, each time counted
    trained_groups: int = 0
    trained_lengths: Mapping[int, int] = field(default_factory=dict)  # tokens -> responses
    cut_lengths: Mapping[int, int] = field(default_factory=dict)  # of responses let go of
    trained_by_domain: Mapping[str, int] = field(default_factory=dict)  # domain -> groups
    # What the bias meter knows of first launches (rollpacker/policy/first_lengths.py).
    first_lengths: Mapping[str, Any] = field(default_factory=dict)
    # Of the trained groups as they count (rollpacker/policy/selection_weights.py).
    weighed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DroppedDraw:
    """A draw that will not be trained: taken out of the queue, or before it was drawn. While the
    cursor is before it, it has no seeds."""

    item: DeferredDraw
    reason: str
    step: int  # steps committed when it was dropped

    @property
    def is_ahead(self) -> bool:
        """Whether its prompt is still to be passed over."""
        return not self.item.draw.seeds


@dataclass(frozen=True, slots=True)
class RunState:
    """The commit point."""

    run_id: str
    settings: Mapping[str, Any]
    create_time: float  # seconds since the Unix epoch
    planned_steps: int = 0  # that data and max_steps allow in all
    status: str = "running"  # queued, running, pausing, paused, stopping, or an end: see runs.py
    step: int = 0  # steps committed; the number of the next one
    weight_version: int = 0
    weights_uri: str = ""
    cursor: Mapping[str, int] = field(default_factory=lambda: {"epoch": 0, "position": 0})
    deferred: tuple[DeferredDraw, ...] = ()  # oldest first within a level
    totals: Totals = Totals()
    failure: str = ""
    stop_mode: str = ""  # "", after_step, drain, immediately
    data_digest: str = ""  # of the data that the cursor is a place in
    pause_at: int | None = None  # pauses when so many steps are committed
    # What people asked for while the run was under way (services/coordinator/changes.py).
    updated_settings: Mapping[str, Any] = field(default_factory=dict)  # over `settings`
    waiting_settings: Mapping[str, Any] = field(default_factory=dict)  # until the queue is empty
    change_count: int = 0  # changes of the log that the state contains
    added_known: int = 0  # added prompts that it knows
    added_drawn: int = 0  # of these, drawn
    begun_step: int = -1  # the step for which these are settled
    long_round: bool = False  # the next round is a long one by request
    dropped: tuple[DroppedDraw, ...] = ()
    # What mode auto plans with (rollpacker/policy/ladder_memory.py).
    ladder_memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChosenLadder:
    """What mode auto chose before a step, and why."""

    step: int
    speculation_factors: tuple[float, ...]
    reason: str  # one line
    tensor_parallel_sizes: tuple[int, ...] = ()  # of engines, by level; empty: they keep their own
    selection_weights: bool = False  # groups count by what deferral selects


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a finished round means for the run, fixed before the optimizer update.

    It is written before FinishStep, so that a crash between the update and the commit changes
    nothing: the same draws are finished and the same state is committed.
    """

    draws: tuple[Draw, ...]  # trained, in order
    next_state: RunState  # without the weights' new place
    record: StepRecord  # without what training and commit still add


def draw_to_json(draw: Draw) -> dict[str, Any]:
    return _values(draw)


def draw_from_json(values: Mapping[str, Any]) -> Draw:
    return Draw(**{**values, "seeds": tuple(values["seeds"])})


def deferred_to_json(deferred: DeferredDraw) -> dict[str, Any]:
    lost = None if deferred.lost is None else _values(deferred.lost)
    return {**_values(deferred), "draw": draw_to_json(deferred.draw), "lost": lost}


def deferred_from_json(values: Mapping[str, Any]) -> DeferredDraw:
    lost = values.get("lost")
    return DeferredDraw(
        draw=draw_from_json(values["draw"]),
        response_tokens=tuple(values["response_tokens"]),
        finished=tuple(values["finished"]),
        lost=None if lost is None else LostRace(**lost),
    )


def state_to_json(state: RunState) -> str:
    """The whole state; also the run snapshot that a checkpoint carries."""
    dropped = [{**_values(d), "item": deferred_to_json(d.item)} for d in state.dropped]
    parts = {
        "deferred": [deferred_to_json(item) for item in state.deferred],
        "totals": _values(state.totals),
        "dropped": dropped,
        "layout_version": LAYOUT_VERSION,
    }
    return json.dumps({**_values(state), **parts})


def state_from_json(text: str | bytes) -> RunState:
    """Raises LayoutError for a layout that this version cannot read."""
    values = json.loads(text)
    layout = values.pop("layout_version", None)
    if layout not in READABLE_LAYOUTS:
        raise LayoutError(
            f"run state has layout {layout}, this version reads {READABLE};"
            " finish the run with the version that started it"
        )
    if layout < 4:
        values["updated_settings"] = _with_old_start(values)
    totals = values.pop("totals")
    trained = _by_length(totals.pop("trained_lengths"))
    cut = _by_length(totals.pop("cut_lengths", {}))
    if layout < 6 and trained:
        totals["weighed"] = _counted_1(totals["trained_groups"], trained)
    deferred = tuple(deferred_from_json(item) for item in values.pop("deferred"))
    dropped = tuple(
        DroppedDraw(**{**item, "item": deferred_from_json(item["item"])})
        for item in values.pop("dropped", ())
    )
    return RunState(
        **values,
        deferred=deferred,
        dropped=dropped,
        totals=Totals(**totals, trained_lengths=trained, cut_lengths=cut),
    )


def _with_old_start(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The updates of a run in mode auto, with the ladder that it began with: it may have a step
    under way that was planned with it."""
    updated: Mapping[str, Any] = values.get("updated_settings", {})
    tail = {**values["settings"].get("tail_batching", {}), **updated.get("tail_batching", {})}
    if tail.get("mode") != "auto" or any(tail.get(name) is not None for name in _OLD_START):
        return updated
    return {**updated, "tail_batching": {**updated.get("tail_batching", {}), **_OLD_START}}


def _counted_1(groups: int, lengths: Mapping[int, int]) -> dict[str, float]:
    """The weighed sums of a run whose trained groups all counted 1."""
    responses = sum(lengths.values())
    tokens = sum(length * count for length, count in lengths.items())
    sums = {"groups": groups, "weights": groups, "squared_weights": groups}
    return {**sums, "responses": responses, "tokens": tokens}


def _values(item: object) -> dict[str, Any]:
    """The fields of a dataclass as they are: `asdict` looks into every number of a large state."""
    return {name: getattr(item, name) for name in _FIELDS[type(item)]}


_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Draw, DeferredDraw, DroppedDraw, LostRace, RunState, StepRecord, Totals)
}


def _by_length(values: Mapping[str, int]) -> dict[int, int]:
    return {int(length): count for length, count in values.items()}


def record_to_json(record: StepRecord) -> str:
    parts = {
        "round_kind": record.round_kind.value,
        "draws": [draw_to_json(draw) for draw in record.draws],
        "flat_draws": [draw_to_json(draw) for draw in record.flat_draws],
    }
    return json.dumps({**_values(record), **parts})


def record_from_json(text: str | bytes) -> StepRecord:
    values = json.loads(text)
    draws = tuple(draw_from_json(draw) for draw in values.pop("draws"))
    flat = tuple(draw_from_json(draw) for draw in values.pop("flat_draws", ()))
    kind = RoundKind(values.pop("round_kind"))
    return StepRecord(**values, round_kind=kind, draws=draws, flat_draws=flat)


def ladder_to_json(chosen: ChosenLadder) -> str:
    return json.dumps(dataclasses.asdict(chosen))


def ladder_from_json(text: str | bytes) -> ChosenLadder:
    values = json.loads(text)
    sizes = tuple(values.pop("tensor_parallel_sizes", ()))
    factors = tuple(values.pop("speculation_factors"))
    return ChosenLadder(**values, speculation_factors=factors, tensor_parallel_sizes=sizes)


def outcome_to_json(outcome: StepOutcome) -> str:
    return json.dumps(
        {
            "draws": [draw_to_json(draw) for draw in outcome.draws],
            "next_state": state_to_json(outcome.next_state),
            "record": record_to_json(outcome.record),
        }
    )


def outcome_from_json(text: str | bytes) -> StepOutcome:
    values = json.loads(text)
    return StepOutcome(
        draws=tuple(draw_from_json(draw) for draw in values["draws"]),
        next_state=state_from_json(values["next_state"]),
        record=record_from_json(values["record"]),
    )
