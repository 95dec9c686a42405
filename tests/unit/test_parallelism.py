"""How the tensor-parallel size follows preemptions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.parallelism import (
    ParallelismRules,
    ParallelismState,
    ResizeCost,
    admission_cap,
    after_round,
)
from rollpacker.types import RoundKind
from services.coordinator.parallelism import ParallelismPlanner

SHORT, LONG = RoundKind.SHORT, RoundKind.LONG
RULES = ParallelismRules(smallest=1, devices_per_host=8)


def play(preemptions: list[int], size: int = 2) -> list[int]:
    state, sizes = ParallelismState(size), []
    for count in preemptions:
        state = after_round(RULES, state, count)
        sizes.append(state.size)
    return sizes


def test_more_preemptions_than_the_last_round_double_the_size() -> None:
    assert play([100, 104]) == [2, 2]
    assert play([100, 106]) == [2, 4]
    assert play([0, 1]) == [2, 4]


def test_a_resize_forgets_the_counts_of_the_old_size() -> None:
    assert play([100, 200, 300, 400]) == [2, 4, 4, 8]


def test_four_quiet_rounds_halve_the_size() -> None:
    assert play([0, 0, 0]) == [2, 2, 2]
    assert play([0, 0, 0, 0]) == [2, 2, 2, 1]


@given(st.lists(st.integers(0, 50), max_size=60), st.sampled_from([1, 2, 4, 8]))
def test_the_size_never_leaves_one_host_nor_falls_below_what_the_model_needs(counts, size) -> None:
    assert all(1 <= n <= 8 for n in play(counts, size))


def test_a_resize_that_does_not_pay_is_not_made() -> None:
    state = ParallelismState(2, last_preemptions=10)
    dear = ResizeCost(resize_seconds=60, saved_seconds_per_round=10, rounds_until_next_change=5)
    cheap = ResizeCost(resize_seconds=40, saved_seconds_per_round=10, rounds_until_next_change=5)
    assert after_round(RULES, state, 100, dear).size == 2
    assert after_round(RULES, state, 100, cheap).size == 4


def test_admission_counts_what_fits_at_full_length() -> None:
    assert admission_cap(10_000, 100, 900) == 10
    assert admission_cap(10, 100, 900) == 1


def rounds(planner: ParallelismPlanner, kind: RoundKind, *preemptions: int) -> list[int]:
    """Rounds of 10 s; a resize takes 30 s."""
    sizes = []
    for count in preemptions:
        sizes.append(planner.size(kind))
        planner.applied(sizes[-1], 30.0)
        planner.after_round(kind, count, 10.0)
    return sizes


def test_kinds_of_rounds_have_sizes_of_their_own() -> None:
    planner = ParallelismPlanner(1, 8)
    assert rounds(planner, LONG, 0, 5, 0) == [1, 1, 2]
    assert rounds(planner, SHORT, 0, 0) == [1, 1]
    assert planner.size(LONG) == 2


def test_a_resize_that_its_rounds_do_not_earn_back_is_not_made() -> None:
    planner = ParallelismPlanner(1, 8)
    # A round saves 5 s at most: 30 s are not earned back by the six in a row after which four
    # quiet ones would have halved the size, but by the ten after which they are counted again.
    sizes = rounds(planner, LONG, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert sizes == [1, 1, *[2] * 8, 1]
