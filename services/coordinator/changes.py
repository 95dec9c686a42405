"""What people may change of a run while it is under way, and what a change does. Pure.

A change stands in the run's log (`RunStore.append_change`) until a step begins; `settled` then
gives the state that contains it. So the same log gives the same state after a crash, and again
after a rewind. Each change may be taken twice without further effect.

A draw may be dropped before it is drawn: it stands among the dropped ones until the data come to it
and pass it over (`PromptSource`). Which draws are ahead is told by who knows the data. So a draw
stays dropped when a rewind takes its first launch back.

Temperature and the cap of a response are part of what a deferred draw means: its seeds replay a
response only under the same. Such an update waits in the state until the queue is empty; until then
no new prompts are drawn (`RunDriver`). So does one that takes the last deferral level away.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollpacker.policy.tail_batching import queue_on
from rollpacker.settings import RunSettings, SettingsError, merge_settings, parse_run_settings
from rollpacker.store.records import ChosenLadder, DroppedDraw, RunState
from rollpacker.types import DeferredDraw, Draw, DrawId

UPDATABLE = (
    "max_steps",
    "reward.attempts",
    "reward.max_concurrent_responses",
    "reward.timeout_seconds",
    "reward.unavailable_seconds",
    "sampling.max_response_tokens",
    "sampling.temperature",
    "tail_batching.carry_over_max_tokens",
    "tail_batching.deferral_levels",
    "tail_batching.max_deferral_age",
    "tail_batching.selection_weights",
    "tail_batching.speculation_factors",
    "tail_batching.tensor_parallel_sizes",
    "trainer.learning_rate",
    "validation.interval",
)
_OF_DRAWS = ("sampling.max_response_tokens", "sampling.temperature")
_LADDER = (
    "tail_batching.deferral_levels",
    "tail_batching.selection_weights",
    "tail_batching.speculation_factors",
    "tail_batching.tensor_parallel_sizes",
)


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """New values of settings, nested as in a run file."""

    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ForceLongRound:
    """The next round is a long one."""


@dataclass(frozen=True, slots=True)
class RequeueDraws:
    """Move draws to the front of a level; dropped ones come back, to the data if not drawn yet."""

    draws: tuple[DrawId, ...]
    level: int  # from 1


@dataclass(frozen=True, slots=True)
class DropDraws:
    """Take draws out of the queue, or out of the data that are ahead."""

    draws: tuple[DrawId, ...]
    reason: str


Change = UpdateSettings | ForceLongRound | RequeueDraws | DropDraws
_KINDS = {kind.__name__: kind for kind in (UpdateSettings, ForceLongRound, RequeueDraws, DropDraws)}


def change_to_json(change: Change) -> str:
    """For the log."""
    return json.dumps({"kind": type(change).__name__, **asdict(change)})


def change_from_json(text: str) -> Change:
    """The inverse of `change_to_json`."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if "draws" in values:
        values["draws"] = tuple(DrawId(*draw) for draw in values["draws"])
    change: Change = kind(**values)
    return change


def settings_in_force(state: RunState) -> RunSettings:
    """The settings of the run with what was updated."""
    return parse_run_settings(merge_settings(state.settings, state.updated_settings))


def checked_update(
    state: RunState, later: Sequence[Change], values: Mapping[str, Any]
) -> UpdateSettings:
    """An update as it may be logged, after the changes that the log holds already.

    Raises SettingsError for what may not be changed, or does not fit.
    """
    names = list(_names(values))
    refused = [name for name in names if name not in UPDATABLE]
    if refused:
        problem = f"may not be changed while the run is under way; may: {', '.join(UPDATABLE)}"
        raise SettingsError([(name, problem) for name in refused])
    if settings_in_force(state).tail_batching.mode == "auto":
        planned = [name for name in names if name in _LADDER]
        if planned:
            raise SettingsError([(name, "is planned by the run, in mode auto") for name in planned])
    if not names:
        raise SettingsError([("settings", f"is empty; give one or more of {', '.join(UPDATABLE)}")])
    merged = merge_settings(state.settings, state.updated_settings)
    merged = merge_settings(merged, state.waiting_settings)
    for change in later:
        if isinstance(change, UpdateSettings):
            merged = merge_settings(merged, change.settings)
    changed = parse_run_settings(merge_settings(merged, values))
    if "max_steps" in names and changed.max_steps is not None and changed.max_steps <= state.step:
        problem = (
            f"{changed.max_steps} is not above the {state.step} committed steps; give more, or end"
            " the run with `rollpacker stop` (after this step) or `stop --drain` (after its queue)"
        )
        raise SettingsError([("max_steps", problem)])
    return UpdateSettings(_picked(changed.model_dump(mode="json"), names))


def settled(state: RunState, changes: Iterable[Change], ahead: Collection[DrawId] = ()) -> RunState:
    """The state with these changes, the next ones of the log.

    `ahead`: of the draws that they drop, those that are not drawn yet.
    """
    for change in changes:
        state = replace(_changed(state, change, ahead), change_count=state.change_count + 1)
    return _settled(state)


def with_ladder(state: RunState, chosen: ChosenLadder) -> RunState:
    """The state with a ladder that mode auto has chosen, as if it had been updated."""
    ladder: dict[str, Any] = {
        "deferral_levels": len(chosen.speculation_factors),
        "speculation_factors": list(chosen.speculation_factors),
        "selection_weights": chosen.selection_weights,
    }
    if chosen.tensor_parallel_sizes:
        ladder["tensor_parallel_sizes"] = list(chosen.tensor_parallel_sizes)
    return _settled(_updated(state, {"tail_batching": ladder}))


def to_drop(changes: Iterable[Change]) -> set[DrawId]:
    """All draws that these changes drop."""
    return {draw for change in changes if isinstance(change, DropDraws) for draw in change.draws}


def known_draws(state: RunState) -> dict[DrawId, DeferredDraw]:
    """The deferred draws and the dropped ones."""
    items = [*state.deferred, *(dropped.item for dropped in state.dropped)]
    return {item.draw.id: item for item in items}


def _settled(state: RunState) -> RunState:
    """What waits is in force where it can be; every draw stands on a level that there is."""
    if state.waiting_settings and not state.deferred:
        updated = merge_settings(state.updated_settings, state.waiting_settings)
        state = replace(state, updated_settings=updated, waiting_settings={})
    levels = _levels(state)
    return replace(
        state,
        long_round=state.long_round and bool(state.deferred),
        deferred=queue_on(levels, state.deferred, levels),
    )


def _changed(state: RunState, change: Change, ahead: Collection[DrawId]) -> RunState:
    match change:
        case UpdateSettings(settings):
            return _updated(state, settings)
        case ForceLongRound():
            return replace(state, long_round=True)
        case RequeueDraws(draws, level):
            return _requeued(state, draws, level)
        case DropDraws(draws, reason):
            return _dropped(state, draws, reason, ahead)


def _updated(state: RunState, values: Mapping[str, Any]) -> RunState:
    names = list(_names(values))
    waiting = [name for name in names if name in _OF_DRAWS]
    whole = merge_settings(merge_settings(state.settings, state.updated_settings), values)
    if parse_run_settings(whole).tail_batching.resolved_levels == 0:
        waiting += [name for name in names if name in _LADDER]
    at_once = [name for name in names if name not in waiting]
    still = [name for name in _names(state.waiting_settings) if name not in at_once]
    updated = replace(
        state,
        updated_settings=merge_settings(state.updated_settings, _picked(values, at_once)),
        waiting_settings=merge_settings(
            _picked(state.waiting_settings, still), _picked(values, waiting)
        ),
    )
    queue = queue_on(_levels(updated), state.deferred, _levels(state))
    return replace(updated, deferred=queue)


def _levels(state: RunState) -> int:
    """Of the ladder that is in force."""
    return settings_in_force(state).tail_batching.resolved_levels


def _dropped(
    state: RunState, draws: Sequence[DrawId], reason: str, ahead: Collection[DrawId]
) -> RunState:
    gone = [item for item in state.deferred if item.draw.id in draws]
    kept = tuple(item for item in state.deferred if item.draw.id not in draws)
    known = known_draws(state)
    gone += [
        DeferredDraw(Draw(*draw, seeds=()), (), ())
        for draw in dict.fromkeys(draws)
        if draw in ahead and draw not in known
    ]
    dropped = [DroppedDraw(item, reason, state.step) for item in gone]
    return replace(state, deferred=kept, dropped=(*state.dropped, *dropped))


def _requeued(state: RunState, draws: Sequence[DrawId], level: int) -> RunState:
    known = known_draws(state)
    moved = [known[draw] for draw in dict.fromkeys(draws) if draw in known]
    moved = [item for item in moved if item.draw.seeds]  # the others are drawn in their turn
    moved = [replace(item, draw=replace(item.draw, level=level)) for item in moved]
    rest = [item for item in state.deferred if item.draw.id not in draws]
    dropped = tuple(item for item in state.dropped if item.item.draw.id not in draws)
    return replace(state, deferred=_by_level([*moved, *rest]), dropped=dropped)


def _by_level(items: Iterable[DeferredDraw]) -> tuple[DeferredDraw, ...]:
    return tuple(sorted(items, key=lambda item: item.draw.level))  # stable


def _names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of nested settings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _picked(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Some of the nested settings."""
    found: dict[str, Any] = {}
    for name in names:
        section, _, key = name.rpartition(".")
        if section:
            found.setdefault(section, {})[key] = values[section][key]
        else:
            found[key] = values[key]
    return found
