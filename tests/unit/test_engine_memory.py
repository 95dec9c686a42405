"""What a run knows of engines of each size, and what it may hope of those that it never had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.engine_forecast import EngineMeasure
from rollpacker.policy.engine_memory import (
    EngineMemory,
    EnginesSeen,
    engines_from_json,
    engines_remembered,
    engines_to_be_had,
    engines_to_json,
    measured_engines,
)
from rollpacker.policy.engine_meter import SpeedSums
from rollpacker.policy.ladder_forecast import PlannerRules

FADES = 0.5
RULES = PlannerRules(8, 4, 4096, smallest_size=1, largest_size=8)


def speed(base: float, equations: int = 60) -> SpeedSums:
    """Steps of `base` seconds, and 1 ms for each running response."""
    sums = SpeedSums()
    for number in range(equations):
        running = 1.0 + number % 7
        sums = sums.add((10.0, 10.0 * running, 0.0), 10.0 * (base + 1e-3 * running))
    return sums


def seen(size: int, base: float = 0.02, apply_seconds: float = 5.0) -> EnginesSeen:
    return EnginesSeen(speed(base), 8 // max(1, size), 1000, 20.0, size, apply_seconds)


def after(*rounds: EnginesSeen) -> EngineMemory:
    memory = EngineMemory()
    for round_ in rounds:
        memory = engines_remembered(memory, round_, FADES)
    return memory


def engine(
    replicas: int, base: float, per_sequence: float = 0.0, per_kv_token: float = 1e-8
) -> EngineMeasure:
    return EngineMeasure(replicas, base, per_sequence, per_kv_token, 1000, 20)


@given(st.lists(st.builds(seen, st.sampled_from([0, 1, 2, 4])), max_size=5))
def test_a_restart_remembers_the_same(rounds: list[EnginesSeen]) -> None:
    memory = after(*rounds)
    assert engines_from_json(json.loads(json.dumps(engines_to_json(memory)))) == memory


def test_each_size_has_a_speed_of_its_own() -> None:
    memory = after(seen(1, 0.04), seen(2, 0.02), seen(1, 0.04))
    engines = measured_engines(memory, [1.0, 9.0, 2.0])
    assert {size: item.replicas for size, item in engines.items()} == {1: 8, 2: 4}
    assert engines[1].base_seconds == pytest.approx(0.04)
    assert engines[2].base_seconds == pytest.approx(0.02)
    assert engines[2].per_sequence_seconds == pytest.approx(1e-3)
    assert engines[1].other_seconds == 2.0


def test_rounds_of_another_size_do_not_fade_what_is_known_of_one() -> None:
    assert after(seen(1), seen(2), seen(2), seen(2)).sizes[1] == after(seen(1)).sizes[1]


def test_a_speed_counts_once_enough_ends_of_responses_were_timed() -> None:
    few = EnginesSeen(speed(0.02, equations=10), 8, 1000, 20.0, 1)
    assert measured_engines(after(few), []) == {}
    assert after(few).equations == 10


def test_a_resize_takes_what_it_takes_beyond_a_refit() -> None:
    """Before the first one: a refit more."""
    assert after(seen(1, apply_seconds=90.0)).resize_seconds == 0.0
    assert after(seen(1, apply_seconds=90.0), seen(1), seen(1)).resize_seconds == 5.0
    resized = seen(2, apply_seconds=35.0)
    assert after(seen(1, apply_seconds=90.0), seen(1), resized).resize_seconds == 30.0
    quicker = seen(1, apply_seconds=5.0)
    assert 0.0 < after(seen(1), seen(1), resized, quicker).resize_seconds < 30.0


def test_engines_that_keep_their_size_are_what_they_are() -> None:
    fixed = PlannerRules(8, 4, 4096)
    assert engines_to_be_had(fixed, {0: engine(8, 0.04)}, (0,)) == {0: engine(8, 0.04)}
    assert engines_to_be_had(RULES, {}, (1,)) == {}


def test_of_weights_of_unknown_size_a_doubling_is_hoped_to_halve_a_step() -> None:
    """And a halving to cost nothing."""
    had = engines_to_be_had(RULES, {2: engine(4, 0.04, 2e-3)}, (2, 2))
    assert set(had) == {1, 2, 4}
    assert (had[4].replicas, had[4].base_seconds, had[4].per_sequence_seconds) == (2, 0.02, 1e-3)
    assert (had[1].replicas, had[1].base_seconds, had[1].per_sequence_seconds) == (8, 0.04, 2e-3)
    assert (had[4].kv_capacity, had[1].kv_capacity) == (2000, 500)


def test_only_the_reading_of_the_weights_is_hoped_to_change_with_the_size() -> None:
    """Of 40 ms 10 are that of a million KV tokens."""
    had = engines_to_be_had(RULES, {2: engine(4, 0.04, 2e-3)}, (2,), weight_kv_tokens=1_000_000)
    assert had[4].base_seconds == pytest.approx(0.035)
    assert had[1].base_seconds == pytest.approx(0.05)
    assert had[4].per_sequence_seconds == had[1].per_sequence_seconds == 2e-3
    assert (had[4].per_kv_token_seconds, had[1].per_kv_token_seconds) == (5e-9, 2e-8)


def test_where_nothing_shows_what_kv_costs_no_size_is_tried() -> None:
    unseen = {2: engine(4, 0.04, per_kv_token=0.0)}
    assert set(engines_to_be_had(RULES, unseen, (2,), weight_kv_tokens=1_000_000)) == {2}
    in_force = engines_to_be_had(RULES, unseen, (2, 4), weight_kv_tokens=1_000_000)
    assert in_force[4].base_seconds == 0.04


seconds = st.floats(1e-3, 0.1)
kv_seconds = st.floats(1e-10, 1e-7)
weights = st.integers(1, 10_000_000)


@given(seconds, seconds, kv_seconds, weights)
def test_known_weights_never_raise_a_hope_and_a_halving_undoes_a_doubling(
    base: float, per_sequence: float, per_kv_token: float, weight_kv_tokens: int
) -> None:
    two = engine(8, base, per_sequence, per_kv_token)
    had = engines_to_be_had(RULES, {2: two}, (2,), weight_kv_tokens)
    blind = engines_to_be_had(RULES, {2: two}, (2,))
    for size in (1, 4):
        assert had[size].base_seconds >= blind[size].base_seconds * (1.0 - 1e-9)
        assert had[size].per_sequence_seconds >= blind[size].per_sequence_seconds
    assert had[1].base_seconds <= 2.0 * base
    back = engines_to_be_had(RULES, {4: had[4]}, (4,), weight_kv_tokens)[2]
    assert back.base_seconds == pytest.approx(base)
    assert (back.replicas, back.per_kv_token_seconds) == (8, pytest.approx(per_kv_token))


@given(seconds, seconds, kv_seconds, weights)
def test_of_two_known_sizes_and_the_weights_what_allows_less_hope_counts(
    small: float, large: float, per_kv_token: float, weight_kv_tokens: int
) -> None:
    known = {
        1: engine(16, small, 0.0, per_kv_token),
        2: engine(8, large, 0.0, per_kv_token / 2.0),
    }
    hope = engines_to_be_had(RULES, known, (2,), weight_kv_tokens)[4].base_seconds
    of_sizes = engines_to_be_had(RULES, known, (2,))[4].base_seconds
    of_weights = engines_to_be_had(RULES, {2: known[2]}, (2,), weight_kv_tokens)[4].base_seconds
    assert hope == max(of_sizes, of_weights)


def test_the_weights_are_remembered_of_replicas_that_do_not_tell_them_any_more() -> None:
    memory = after(replace(seen(1), weight_kv_tokens=7), seen(1))
    assert memory.weight_kv_tokens == 7


def test_a_memory_from_before_weights_were_told_is_read() -> None:
    values = engines_to_json(after(seen(1)))
    del values["weight_kv_tokens"]
    assert engines_from_json(values) == after(seen(1))


def test_once_two_sizes_are_known_a_third_is_hoped_to_go_on_like_them() -> None:
    had = engines_to_be_had(RULES, {1: engine(8, 0.10), 2: engine(4, 0.08)}, (1,))
    assert had[4].base_seconds == pytest.approx(0.064)
    slower = engines_to_be_had(RULES, {1: engine(8, 0.10), 2: engine(4, 0.12)}, (1,))
    assert slower[4].base_seconds == pytest.approx(0.12)


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(4, 8))
def test_no_size_is_beyond_the_limits_or_more_than_one_step_away(
    measured: int, smallest: int, largest: int
) -> None:
    rules = PlannerRules(8, 4, 4096, smallest_size=smallest, largest_size=largest)
    had = engines_to_be_had(rules, {measured: engine(8, 0.04)}, (measured,))
    for size in had.keys() - {measured}:
        assert smallest <= size <= largest
        assert size in (2 * measured, measured // 2)


def test_a_size_for_which_there_are_too_few_devices_is_not_had() -> None:
    assert set(engines_to_be_had(RULES, {4: engine(1, 0.04)}, (4,))) == {4, 2}


def test_what_is_in_force_is_had_however_few_devices_are_left() -> None:
    """A ladder keeps its sizes until another one is better."""
    had = engines_to_be_had(RULES, {1: engine(1, 0.04)}, (1, 4))
    assert had[4].replicas == 1
    assert 2 not in had


def test_a_speed_of_which_nobody_knew_the_size_counts_for_none() -> None:
    assert engines_to_be_had(RULES, {0: engine(8, 0.04)}, (1, 1)) == {}
    assert set(engines_to_be_had(RULES, {0: engine(8, 0.04), 2: engine(4, 0.04)}, (2,))) == {
        1,
        2,
        4,
    }
