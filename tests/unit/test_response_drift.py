"""Which law of change explains the pairs of responses that a run has seen, and what it says."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.response_drift import (
    Pairs,
    PairsSeen,
    between,
    octave,
    telling,
    unchanged,
)


def seen(
    keep: object, count: int = 4000, longest: int = 2000, shortest: int = 10, seed: int = 0
) -> PairsSeen:
    """Pairs of responses, unchanged with probability `keep(updates, tokens)`."""
    rng = random.Random(seed)
    found: dict[tuple[int, int], Pairs] = {}
    for _ in range(count):
        updates = rng.choice([1, 2, 4])
        tokens = int(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        key = updates, octave(tokens)
        same = rng.random() < keep(updates, tokens)  # type: ignore[operator]
        found[key] = found.get(key, Pairs()).add(tokens, same=same)
    return found


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
def test_changes_of_tokens_are_found_and_say_more_of_long_responses(rate: float) -> None:
    law = unchanged(seen(lambda updates, tokens: math.exp(-rate * updates * tokens)))
    assert -math.log(law(1, 100)) / 100 == pytest.approx(rate, rel=0.15)
    assert law(3, 1000) == pytest.approx(law(1, 3000)) == pytest.approx(law(1, 1000) ** 3)


def test_a_share_that_is_the_same_at_any_length_is_taken_for_one() -> None:
    shares = {1: 0.83, 2: 0.63, 4: 0.56}
    law = unchanged(seen(lambda updates, _tokens: shares[updates]))
    for updates, share in shares.items():
        assert law(updates, 20) == law(updates, 20_000) == pytest.approx(share, abs=0.05)
    assert shares[2] > law(3, 20) > shares[4] - 0.05


def test_short_responses_do_not_say_how_long_ones_change() -> None:
    """As in the demo: a third ends within three tokens, and of these many come out otherwise."""

    def keep(updates: int, tokens: int) -> float:
        return 0.8**updates if tokens < 4 else math.exp(-0.0037 * updates * tokens)

    pairs = seen(keep, longest=200, shortest=2)
    law = unchanged(pairs)
    assert -math.log(law(1, 100)) / 100 == pytest.approx(0.0037, rel=0.15)
    assert law(3, 100) == pytest.approx(law(1, 300))  # tokens change, no share of the responses
    assert telling(pairs) == {key: item for key, item in pairs.items() if key[1] >= 4}


def test_where_all_responses_are_short_they_say_it() -> None:
    pairs = seen(lambda updates, tokens: math.exp(-0.01 * updates * tokens), longest=15, shortest=2)
    assert telling(pairs) == pairs
    assert -math.log(unchanged(pairs)(1, 10)) / 10 == pytest.approx(0.01, rel=0.15)


@pytest.mark.parametrize("count", [100, 300, 1000])
def test_chance_is_not_taken_for_a_share_that_differs_from_age_to_age(count: int) -> None:
    """Few pairs, of lengths that hardly differ: a table with a number per age would follow them."""
    by_token = [
        unchanged(
            seen(
                lambda updates, tokens: math.exp(-0.004 * updates * tokens),
                count=count,
                shortest=40,
                longest=90,
                seed=seed,
            )
        )
        for seed in range(40)
    ]
    assert sum(law(1, 40) != law(1, 90) for law in by_token) >= 32


def test_nothing_changes_while_nothing_was_seen_to_change() -> None:
    assert unchanged({})(8, 30_000) == 1.0
    assert unchanged(seen(lambda updates, tokens: 1.0))(8, 30_000) == 1.0


@given(st.integers(0, 10), st.floats(0.0, 40.0), st.floats(0.0, 1e5), st.floats(0.0, 1e5))
def test_what_is_unchanged_up_to_a_token_is_unchanged_before(
    seed: int, updates: float, one: float, other: float
) -> None:
    law = unchanged(seen(lambda age, tokens: 0.9**age, count=100, seed=seed))
    assert 0.0 <= law(updates, max(one, other)) <= law(updates, min(one, other)) <= 1.0
    assert law(0.0, one) == 1.0


def test_the_tokens_of_an_octave_differ_by_less_than_two_times() -> None:
    assert [octave(n) for n in (0, 1, 2, 3, 4, 7, 8, 1023, 1024)] == [0, 0, 1, 1, 2, 2, 3, 9, 10]


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(lambda s: sorted(s, reverse=True)),
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
)
def test_behind_the_oldest_that_was_seen_less_and_less_is_left(
    shares: list[float], at: float, further: float
) -> None:
    points = [(0.0, 1.0), *((0.5 * n, share) for n, share in enumerate(shares, start=1))]
    assert 0.0 <= between(points, at + further) <= between(points, at) + 1e-12
    last, share = points[-1]
    assert between(points, 2.0 * last) == pytest.approx(share**2)


def test_nothing_is_lost_with_age_while_no_age_was_seen() -> None:
    assert between([(0.0, 1.0)], 3.0) == 1.0
