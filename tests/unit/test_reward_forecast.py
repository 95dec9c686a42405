"""How long a round waits for rewards: for the work that is left, for the slowest of the last."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.group_law import GroupLaw, ObservedGroup
from rollpacker.policy.reward_forecast import GraderMeasure, part_of_octave, scored_seconds

CAP = 4096


def law_of(rows: list[tuple[int, ...]], grader: str = "code") -> GroupLaw:
    return GroupLaw([ObservedGroup(row, complete=True, grader=grader) for row in rows], CAP)


def scored(law: GroupLaw, grader: GraderMeasure, groups: int) -> float:
    """A round that trains everything, decodes a token in 10 ms and ends at the longest response."""
    profile = [0.01 * tokens for tokens in law.grid]
    kept = [groups * item.mass for item in law.bins]
    return scored_seconds({"code": grader}, law, profile, kept, [profile[-1]], [39])[0]


@given(st.lists(st.floats(0.001, 100.0), min_size=1), st.floats(0.001, 200.0))
def test_longer_is_a_share_that_falls_from_one_to_none(seen: list[float], seconds: float) -> None:
    grader = GraderMeasure(took=Counter(part_of_octave(item) for item in seen))
    assert grader.longer(0.0) == 1.0
    assert grader.longer(seconds) >= grader.longer(1.1 * seconds)
    assert grader.longer(1.2 * max(seen)) == 0.0
    part = 2.0**0.25  # one counts anywhere in its part of an octave
    low, high = (sum(item > seconds * by for item in seen) / len(seen) for by in (part, 1 / part))
    assert low - 1e-9 <= grader.longer(seconds) <= high + 1e-9


@pytest.mark.parametrize("count", [1, 8, 100])
def test_the_last_of_many_is_waited_for_as_long_as_the_slowest_of_them_takes(count: int) -> None:
    """Against draws: responses that end together, each graded for some seconds."""
    rng = random.Random(0)
    takes = [math.exp(rng.gauss(1.0, 0.8)) for _ in range(20_000)]
    grader = GraderMeasure(took=Counter(map(part_of_octave, takes)))
    law = law_of([(CAP - 1,)])
    slowest = median(max(rng.sample(takes, count)) for _ in range(2000))
    assert scored(law, grader, count) == pytest.approx(0.01 * CAP + slowest, rel=0.1)


def test_what_was_asked_for_long_before_the_end_is_there_by_then() -> None:
    grader = GraderMeasure(took={part_of_octave(10.0): 1.0})
    end = 0.01 * CAP
    assert scored(law_of([(20, CAP)]), grader, 64) == pytest.approx(end)
    assert scored(law_of([(20, CAP - 1)]), grader, 64) > end + 9.0
    many = law_of([(20,) * 7 + (CAP,)])
    assert scored(many, GraderMeasure(0.2), 64) == pytest.approx(0.2 * 64 * 8, rel=0.01)


def test_a_response_that_was_cut_off_holds_nothing_that_takes_long() -> None:
    grader = GraderMeasure(took={part_of_octave(30.0): 1.0})
    assert scored(law_of([(CAP,) * 4]), grader, 64) == pytest.approx(0.01 * CAP)


@given(st.floats(0.0, 2.0), st.floats(1.0, 3.0), st.integers(1, 200))
def test_slower_graders_never_end_a_round_sooner(cost: float, times: float, groups: int) -> None:
    rng = random.Random(3)
    law = law_of([tuple(rng.randint(1, CAP) for _ in range(4)) for _ in range(64)])
    found = [
        scored(law, GraderMeasure(factor * cost, {part_of_octave(2.0 * factor): 1.0}), groups)
        for factor in (1.0, times)
    ]
    assert all(fast <= slow + 1e-6 for fast, slow in pairwise(found))
    assert found[0] >= 0.01 * CAP - 1e-9


def test_graders_of_which_nothing_is_known_are_not_waited_for() -> None:
    """Nor where a point is behind a later one: there is room again, and what waited catches up."""
    law = law_of([(20, CAP - 1)])
    profile = [0.01 * tokens for tokens in law.grid]
    profile[20] = 2.0 * profile[-1]
    kept = [64 * item.mass for item in law.bins]
    found = scored_seconds({"code": GraderMeasure()}, law, profile, kept, [profile[-1]], [39])
    assert found == [profile[-1]]
