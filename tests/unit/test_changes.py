"""What changes of a run do to its state: nothing is lost, a repeat has no further effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.settings import SettingsError, parse_run_settings
from rollpacker.store.records import ChosenLadder, RunState, state_from_json, state_to_json
from rollpacker.types import DeferredDraw, Draw, DrawId
from services.coordinator.changes import (
    Change,
    DropDraws,
    ForceLongRound,
    RequeueDraws,
    UpdateSettings,
    change_from_json,
    change_to_json,
    checked_update,
    settings_in_force,
    settled,
    with_ladder,
)

SETTINGS = parse_run_settings(
    {"model": "/m", "data": {"path": "/d"}, "tail_batching": {"deferral_levels": 3}}
).model_dump(mode="json")


def state_with(levels: list[int], **more: Any) -> RunState:
    """A queue of one draw per level given, oldest first within a level."""
    items = [
        DeferredDraw(Draw(0, str(i), (i,), level, first_step=i), (1,), (False,))
        for i, level in enumerate(levels)
    ]
    items.sort(key=lambda item: item.draw.level)
    return RunState("r", SETTINGS, 1.0, deferred=tuple(items), **more)


names = st.lists(st.builds(DrawId, st.just(0), st.sampled_from("0123456789")), max_size=4)
updates = st.sampled_from(
    [
        {"trainer": {"learning_rate": 0.5}},
        {"sampling": {"temperature": 0.5}},
        {"tail_batching": {"deferral_levels": 1}},
        {"tail_batching": {"deferral_levels": 0}, "max_steps": 9},
    ]
)
change_strategy = st.one_of(
    updates.map(UpdateSettings),
    st.builds(ForceLongRound),
    st.builds(RequeueDraws, names.map(tuple), st.integers(1, 3)),
    st.builds(DropDraws, names.map(tuple), st.just("wrong")),
)
states = st.lists(st.integers(1, 3), max_size=8).map(state_with)


def all_draws(state: RunState) -> list[str]:
    dropped = [dropped.item for dropped in state.dropped]
    return sorted(item.draw.prompt_id for item in [*state.deferred, *dropped])


@given(states, st.lists(change_strategy, max_size=6))
def test_every_draw_stays_in_the_queue_or_among_the_dropped_once(
    state: RunState, changes: list[Change]
) -> None:
    after = settled(state, changes)
    assert all_draws(after) == all_draws(state)
    assert after.change_count == len(changes)
    levels = [item.draw.level for item in after.deferred]
    assert levels == sorted(levels)
    assert all(1 <= level <= 3 for level in levels)
    assert {i.draw.seeds for i in after.deferred} <= {i.draw.seeds for i in state.deferred}


@given(states, st.lists(change_strategy, max_size=6))
def test_a_draw_that_is_ahead_is_dropped_once_until_it_is_asked_for_again(
    state: RunState, changes: list[Change]
) -> None:
    queued = set(all_draws(state))
    ahead = {DrawId(0, name) for name in "0123456789" if name not in queued}
    dropped: set[DrawId] = set()
    for change in changes:
        if isinstance(change, DropDraws):
            dropped |= set(change.draws) & ahead
        elif isinstance(change, RequeueDraws):
            dropped -= set(change.draws)
    after = settled(state, changes, ahead)
    assert all_draws(after) == sorted(queued | {draw.prompt_id for draw in dropped})
    assert {item.item.draw.id for item in after.dropped if item.is_ahead} == dropped


@given(states, change_strategy)
def test_a_change_that_is_taken_twice_does_no_more(state: RunState, change: Change) -> None:
    once = settled(state, [change])
    twice = settled(state, [change, change])
    assert dataclasses.replace(twice, change_count=1) == once


@given(states, st.lists(change_strategy, max_size=3), st.lists(change_strategy, max_size=3))
def test_what_is_settled_in_two_steps_is_what_is_settled_in_one(
    state: RunState, first: list[Change], second: list[Change]
) -> None:
    in_two = settled(settled(state, first), second)
    in_one = settled(state, [*first, *second])
    assert settings_in_force(in_two) == settings_in_force(in_one)
    assert all_draws(in_two) == all_draws(in_one)


@given(states, st.lists(change_strategy, max_size=4))
def test_changes_and_states_survive_the_log(state: RunState, changes: list[Change]) -> None:
    assert [change_from_json(change_to_json(change)) for change in changes] == changes
    after = settled(state, changes)
    assert state_from_json(state_to_json(after)) == after


def test_what_a_deferred_draw_means_changes_when_the_queue_is_empty() -> None:
    update = UpdateSettings({"sampling": {"temperature": 0.5}, "trainer": {"learning_rate": 0.5}})
    waiting = settled(state_with([1, 2]), [update])
    assert settings_in_force(waiting).sampling.temperature == 1.0
    assert settings_in_force(waiting).trainer.learning_rate == 0.5
    assert waiting.waiting_settings == {"sampling": {"temperature": 0.5}}
    drained = settled(dataclasses.replace(waiting, deferred=()), [])
    assert settings_in_force(drained).sampling.temperature == 0.5
    assert drained.waiting_settings == {}


def test_draws_above_a_lowered_level_join_it_by_age() -> None:
    state = state_with([3, 1, 2, 1])
    after = settled(state, [UpdateSettings({"tail_batching": {"deferral_levels": 1}})])
    assert [(i.draw.prompt_id, i.draw.level) for i in after.deferred] == [
        ("0", 1),
        ("1", 1),
        ("2", 1),
        ("3", 1),
    ]


def test_an_update_is_checked_against_those_that_wait_before_it() -> None:
    state = state_with([])
    factors = UpdateSettings({"tail_batching": {"speculation_factors": [1.5, 1.5, 1.5]}})
    with pytest.raises(SettingsError, match="deferral levels"):
        checked_update(state, [factors], {"tail_batching": {"deferral_levels": 2}})
    both = {"tail_batching": {"deferral_levels": 2, "speculation_factors": [1.5, 1.5]}}
    assert checked_update(state, [factors], both) == UpdateSettings(both)


def test_the_ladder_of_mode_auto_is_not_for_people_to_change() -> None:
    """Else a rewind would lay their half of it over another ladder."""
    auto = {"model": "/m", "data": {"path": "/d"}, "tail_batching": {"mode": "auto"}}
    state = RunState("r", parse_run_settings(auto).model_dump(mode="json"), 1.0)
    with pytest.raises(SettingsError, match="speculation_factors: is planned"):
        checked_update(state, [], {"tail_batching": {"speculation_factors": [1.5]}})
    with pytest.raises(SettingsError, match="deferral_levels: is planned"):
        checked_update(state, [], {"tail_batching": {"deferral_levels": 1}})


def test_the_newest_value_holds_also_over_one_that_waits() -> None:
    none, two = ({"tail_batching": {"deferral_levels": levels}} for levels in (0, 2))
    state = settled(state_with([1, 1]), [UpdateSettings(none)])
    assert state.waiting_settings == none
    after = settled(state, [UpdateSettings(two)])
    assert (after.updated_settings, after.waiting_settings) == (two, {})


def ladder(*factors: float, weights: bool = False) -> ChosenLadder:
    return ChosenLadder(3, factors, "", selection_weights=weights)


def test_weights_come_and_go_with_the_ladder() -> None:
    state = with_ladder(state_with([1, 2, 2]), ladder(1.25, weights=True))
    assert settings_in_force(state).tail_batching.resolved_selection_weights
    waiting = with_ladder(state, ladder())
    assert settings_in_force(waiting).tail_batching.resolved_selection_weights  # of what is queued
    drained = settled(dataclasses.replace(waiting, deferred=()), [])
    assert not settings_in_force(drained).tail_batching.resolved_selection_weights
    settings = {**state.settings, "tail_batching": {"mode": "auto"}}
    planned = dataclasses.replace(state, settings=settings)
    values = {"tail_batching": {"selection_weights": False}}
    with pytest.raises(SettingsError, match="selection_weights.*planned by the run, in mode auto"):
        checked_update(planned, [], values)


def test_a_planned_ladder_is_in_force_at_once_and_none_waits_for_the_end_of_the_queue() -> None:
    state = with_ladder(state_with([1, 2, 2]), ladder(1.25))
    assert settings_in_force(state).tail_batching.resolved_speculation_factors == (1.25,)
    assert [item.draw.level for item in state.deferred] == [1, 1, 1]
    higher = with_ladder(
        with_ladder(state_with([1, 2, 2]), ladder(1.5, 1.75)), ladder(2.0, 2.0, 2.0)
    )
    assert [item.draw.level for item in higher.deferred] == [1, 3, 3]  # next: a long round
    waiting = with_ladder(state, ladder())
    assert settings_in_force(waiting).tail_batching.resolved_levels == 1
    drained = settled(dataclasses.replace(waiting, deferred=()), [])
    assert settings_in_force(drained).tail_batching.resolved_speculation_factors == ()
    again = with_ladder(waiting, ladder(1.5, 2.0))  # chosen before the queue was empty
    assert again.waiting_settings == {}
    assert settings_in_force(again).tail_batching.resolved_speculation_factors == (1.5, 2.0)
