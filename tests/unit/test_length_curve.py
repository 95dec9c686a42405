"""The length curve: what is seen, censored or not, recent or old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.bias_meter import kaplan_meier_mean
from rollpacker.policy.length_curve import LengthCurve, Observation

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=30)


def finished(lengths: list[int]) -> LengthCurve:
    return LengthCurve(Observation(tokens, True) for tokens in lengths)


@given(LENGTHS)
def test_without_censoring_it_is_the_empirical_law(lengths: list[int]) -> None:
    curve = finished(lengths)
    assert curve.mean() == pytest.approx(sum(lengths) / len(lengths))
    for tokens in (0, 50, 100, 199):
        longer = [length for length in lengths if length > tokens]
        assert curve.survival(tokens) == pytest.approx(len(longer) / len(lengths))
        if longer:
            assert curve.mean_beyond(tokens) == pytest.approx(sum(longer) / len(longer))


@given(LENGTHS, LENGTHS)
def test_its_mean_is_the_kaplan_meier_mean_of_the_bias_meter(
    ended: list[int], cut: list[int]
) -> None:
    cut = [min(tokens, max(ended) - 1) for tokens in cut]
    curve = LengthCurve(
        [*(Observation(t, True) for t in ended), *(Observation(t, False) for t in cut)]
    )
    counts = ({t: ended.count(t) for t in ended}, {t: cut.count(t) for t in cut})
    assert curve.mean() == pytest.approx(kaplan_meier_mean(*counts))


def test_recent_responses_count_more() -> None:
    curve = LengthCurve([Observation(10, True, 1.0), Observation(100, True, 3.0)])
    assert curve.survival(10) == pytest.approx(0.75)
    assert curve.quantile(0.25) == 10
    assert curve.quantile(0.26) == 100


def test_nothing_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="observations: none"):
        LengthCurve([])
