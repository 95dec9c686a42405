"""The arithmetic of the charts: scales, ticks, bins, intervals, strips."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.outputs.charts import score_interval
from services.coordinator.outputs.formatting import format_duration, format_number
from services.coordinator.outputs.lines import StepLine, ValidationLine
from services.coordinator.outputs.phases import phase_spans
from services.coordinator.outputs.round_charts import binned_shares, length_edges
from services.coordinator.outputs.svg import Scale, bucket_means, element, nice, text, value_scale

_VALUES = st.floats(-1e9, 1e9)


def test_attributes_and_text_are_escaped() -> None:
    assert element("g", "<&>", class_='a"b', text_anchor="end", x=None) == (
        '<g class="a&#34;b" text-anchor="end">&lt;&amp;&gt;</g>'
    )
    assert "<script>" not in text((0, 0), "<script>")


@settings(deadline=None)
@given(st.lists(_VALUES, min_size=1), st.booleans())
def test_a_scale_has_room_for_every_value(values: list[float], zero: bool) -> None:
    scale = value_scale(values, 100, 0, zero)
    assert all(-0.01 <= scale(value) <= 100.01 for value in values)
    assert 2 <= len(scale.ticks()) <= 7


@settings(deadline=None)
@given(_VALUES, st.floats(1e-6, 1e9))
def test_ticks_are_evenly_spaced_around_the_domain(low: float, size: float) -> None:
    ticks, high = nice(low, low + size, 4), low + size
    slack = 1e-6 * size + 1e-9 * abs(low)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    assert max(steps) - min(steps) <= slack


def test_a_logarithmic_scale_puts_equal_factors_at_equal_distances() -> None:
    scale = Scale(1, 100, 0, 200, log=True)
    assert [round(scale(value)) for value in (1, 10, 100)] == [0, 100, 200]
    assert scale(0) == 0
    assert Scale(16, 1024, 0, 1, log=True).ticks() == [16, 64, 256, 1024]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_length_bins_cover_the_range_in_growing_whole_steps(first: int, second: int) -> None:
    low, high = min(first, second), max(first, second)
    edges = length_edges(low, high)
    assert edges[0] <= low
    assert edges[-1] > high
    assert edges == sorted(set(edges))
    assert len(edges) < 45


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1))
def test_shares_of_all_bins_sum_to_one(values: list[int]) -> None:
    counts = Counter(values)
    shares = binned_shares(counts, length_edges(min(values), max(values)))
    assert sum(shares) == pytest.approx(1)


@settings(deadline=None)
@given(st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=50), st.integers(1, 60))
def test_buckets_keep_few_points(points: list[tuple[float, float]], limit: int) -> None:
    found = bucket_means(points, limit)
    assert len(found) <= limit
    if len(points) <= limit:
        assert found == points


def test_the_interval_of_a_score_is_wilsons() -> None:
    line = ValidationLine(0, "held_out", 0.0, {"accuracy": 0.5, "count": 100})
    assert score_interval(line) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert score_interval(replace(line, values={"accuracy": 0.5})) is None
    assert score_interval(replace(line, values={"accuracy": 7.0, "count": 9})) is None
    low, high = score_interval(replace(line, values={"accuracy": 0.0, "count": 10})) or (1, 0)
    assert (low, round(high, 3)) == (0.0, 0.278)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            f"timing_s/{name}": st.floats(0, 9)
            for name in ("apply_weights", "train_wait", "commit")
        },
    ),
    st.floats(-5, 5),
    st.floats(0, 5),
)
def test_phases_follow_each_other_within_the_step(
    metrics: dict[str, float], rollout: float, length: float
) -> None:
    line = StepLine(0, "short", 0, 100.0, 100.0 + rollout, 100.0 + length, 1, 1, metrics)
    spans = phase_spans(line)
    times = [time for span in spans for time in (span.start, span.end)]
    assert times == sorted(times)
    assert all(100.0 <= time <= 100.0 + length for time in times)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0, "0"),
        (12345.6, "12,346"),
        (123.4, "123"),
        (12.34, "12.3"),
        (0.01234, "0.0123"),
    ],
)
def test_numbers_have_three_digits(value: float | None, words: str) -> None:
    assert format_number(value) == words


def test_durations_show_two_units() -> None:
    assert [format_duration(value) for value in (None, 9.87, 61, 3600, 7320)] == [
        "–",
        "9.9 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 02 min",
    ]
