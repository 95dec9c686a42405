"""Weighed, what is trained has the law of groups that nobody selects: by enumeration, exactly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.selection_weights import Relaunch, selection_weight, stay_probability

Law = dict[tuple[int, ...], float]
LENGTHS = range(1, 6)


def again(
    length: int, law: dict[int, float], unchanged: Callable[[int], float]
) -> dict[int, float]:
    """What a response of that length comes out as: it keeps its tokens before the first changed
    one, and ends somewhere behind them."""
    found: dict[int, float] = defaultdict(float)
    found[length] += unchanged(length)
    for first_changed in range(length):
        share = unchanged(first_changed) - unchanged(first_changed + 1)
        behind = {n: p for n, p in law.items() if n > first_changed}
        for n, p in behind.items():
            found[n] += share * p / sum(behind.values())
    return found


def selected(
    sample: Sequence[int],
    size: int,
    cuts: Sequence[int],
    unchanged: Callable[[int], float],
    weigh: bool,
) -> Law:
    """The law of what is trained: groups within the cut of their level, the others as they come
    out of the next one; the last level keeps all."""
    law = {n: sample.count(n) / len(sample) for n in set(sample)}
    one = {n: again(n, law, unchanged) for n in law}
    trained: Law = defaultdict(float)
    waiting: Law = {g: math.prod(law[n] for n in g) for g in product(law, repeat=size)}
    for level, cut in enumerate((*cuts, max(sample))):
        lost: Law = defaultdict(float)
        for group, mass in waiting.items():
            if max(group) <= cut:
                trained[group] += mass
                continue
            for after in product(*(one[n] for n in group)):
                moved = mass * math.prod(one[n][m] for n, m in zip(group, after, strict=True))
                if weigh and max(after) <= cuts[level]:
                    continue  # counts nothing
                stays = stay_probability(after, cut, unchanged, sample) if weigh else 1.0
                lost[after] += moved / stays
        waiting = lost
    return trained


def by_response(share: float) -> Callable[[int], float]:
    return lambda tokens: share if tokens else 1.0


def by_token(rate: float) -> Callable[[int], float]:
    return lambda tokens: math.exp(-rate * tokens)


UNCHANGED = st.floats(0.0, 1.0).map(by_response) | st.floats(0.0, 3.0).map(by_token)


@given(
    st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=6),
    st.integers(1, 2),
    st.data(),
    UNCHANGED,
)
def test_weighed_groups_have_the_law_of_groups_that_nobody_selects(
    sample: list[int], size: int, data: st.DataObject, unchanged: Callable[[int], float]
) -> None:
    cuts = data.draw(st.lists(st.integers(1, max(1, max(sample) - 1)), min_size=1, max_size=2))
    trained = selected(sample, size, sorted(cuts), unchanged, weigh=True)
    for group in product(set(sample), repeat=size):
        wanted = math.prod(sample.count(n) / len(sample) for n in group)
        assert trained[group] == pytest.approx(wanted, abs=1e-9)


def test_without_weights_long_ones_are_missing() -> None:
    sample = [1, 1, 2, 5]
    for unchanged in (by_response(0.5), by_token(0.3)):
        trained = selected(sample, 2, [2], unchanged, weigh=False)
        mean = sum(p * sum(group) for group, p in trained.items()) / 2
        assert mean < 0.95 * sum(sample) / len(sample)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=8), st.integers(1, 99), UNCHANGED)
def test_a_weight_is_0_or_1_at_least(
    lengths: list[int], cut: int, unchanged: Callable[[int], float]
) -> None:
    weight = selection_weight([Relaunch(cut, lengths, unchanged)])
    if max(lengths) <= cut:
        assert weight == 0.0
    else:
        assert 1.0 - 1e-12 <= weight < math.inf


def test_weights_that_do_not_move_weigh_nothing() -> None:
    relaunch = Relaunch(10, [3, 11, 40], by_token(0.0))
    assert selection_weight([relaunch, relaunch]) == 1.0
    assert selection_weight([]) == 1.0


def test_relaunches_multiply() -> None:
    one = Relaunch(4, [2, 2, 9], by_response(0.5))
    other = Relaunch(8, [2, 2, 9], by_response(0.5))
    first, second = selection_weight([one]), selection_weight([other])
    assert first > 1.0
    assert selection_weight([one, other]) == pytest.approx(first * second)
