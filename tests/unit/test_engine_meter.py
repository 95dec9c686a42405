"""The meter finds the speed that the events were made with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.commands import AbortGroup, LaunchGroup
from rollpacker.policy.engine_meter import (
    DecodeSeconds,
    EngineMeter,
    SpeedSums,
    decode_seconds,
)
from rollpacker.policy.events import (
    GroupInterrupted,
    ReplicaJoined,
    ReplicaLost,
    ResponseFinished,
)
from rollpacker.types import DrawId

PROMPT = 50


def draw(number: int) -> DrawId:
    return DrawId(0, str(number))


def round_of(speed: DecodeSeconds, lengths: list[int], carried: int = 0) -> EngineMeter:
    """One replica runs a group of one response for each length, all from the start."""
    meter = EngineMeter(PROMPT)
    launched = [LaunchGroup(draw(n), "a", (0,)) for n in range(len(lengths))]
    meter.handled(ReplicaJoined(0.0, "a", len(lengths), 9000), launched)
    now, done = 0.0, 0
    for rank, (length, number) in enumerate(sorted((t, n) for n, t in enumerate(lengths))):
        running = len(lengths) - rank
        made = length - done
        kv_tokens = running * (PROMPT + done + made / 2)
        per_step = speed.base + speed.per_sequence * running + speed.per_kv_token * kv_tokens
        now, done = now + made * per_step, length
        finished = ResponseFinished(now, draw(number), 0, length + carried, carried)
        meter.handled(finished, [])
    return meter


SPEEDS = st.builds(
    DecodeSeconds, st.floats(1e-3, 0.1), st.floats(1e-5, 1e-3), st.floats(1e-9, 1e-6)
)


@given(SPEEDS, st.lists(st.integers(1, 4000), min_size=8, max_size=40, unique=True))
def test_the_speed_that_the_events_were_made_with_is_found(
    speed: DecodeSeconds, lengths: list[int]
) -> None:
    sums = SpeedSums()
    for part in (lengths, lengths[: len(lengths) // 2], lengths[:3]):  # full and empty replicas
        sums = sums.faded(0.9, round_of(speed, part).sums)
    found = decode_seconds(sums)
    assert found is not None
    for running, kv_tokens in ((1, 500), (20, 40_000)):
        times = [
            s.base + s.per_sequence * running + s.per_kv_token * kv_tokens for s in (found, speed)
        ]
        assert times[0] == pytest.approx(times[1], rel=0.02)


@given(SPEEDS, st.lists(st.integers(1, 300), min_size=3, max_size=10, unique=True))
def test_tokens_that_were_carried_over_took_no_steps(
    speed: DecodeSeconds, lengths: list[int]
) -> None:
    assert round_of(speed, lengths, carried=100).sums == round_of(speed, lengths).sums


@given(
    st.lists(
        st.tuples(
            st.tuples(st.floats(1, 1e3), st.floats(1, 1e4), st.floats(1, 1e6)),
            st.floats(0, 1e3),
        ),
        max_size=20,
    )
)
def test_no_part_of_a_step_takes_less_than_no_time(
    equations: list[tuple[tuple[float, float, float], float]],
) -> None:
    sums = SpeedSums()
    for terms, seconds in equations:
        sums = sums.add(terms, seconds)
    found = decode_seconds(sums)
    assert found is None or min(found.base, found.per_sequence, found.per_kv_token) >= 0


def test_nothing_is_known_without_an_equation() -> None:
    assert decode_seconds(SpeedSums()) is None


def test_what_did_not_advance_with_the_others_gives_no_equation() -> None:
    meter = EngineMeter(PROMPT)
    launched = [LaunchGroup(draw(number), "a", (0,)) for number in range(2)]
    meter.handled(ReplicaJoined(0.0, "a", 2), launched)
    meter.handled(ResponseFinished(10.0, draw(0), 0, 100), [])
    before = meter.sums
    meter.handled(ResponseFinished(12.0, draw(1), 0, 90), [])  # preempted for a while
    assert meter.sums == before


def test_a_launch_in_the_middle_counts_from_where_its_replica_is() -> None:
    meter = EngineMeter(PROMPT)
    meter.handled(ReplicaJoined(0.0, "a", 2), [LaunchGroup(draw(0), "a", (0, 1))])
    next_ = LaunchGroup(draw(1), "a", (0,))
    meter.handled(ResponseFinished(10.0, draw(0), 0, 100), [next_])
    meter.handled(ResponseFinished(30.0, draw(1), 0, 200), [])
    assert meter.sums.targets[0] == 100 * 10.0 + 200 * 20.0


def test_late_news_of_a_lost_replica_means_nothing() -> None:
    meter = EngineMeter(PROMPT)
    groups = [LaunchGroup(draw(number), "a", (0,)) for number in range(3)]
    meter.handled(ReplicaJoined(0.0, "a", 4, 500), groups)
    meter.handled(ReplicaJoined(0.0, "b", 4, 300), [])
    meter.handled(GroupInterrupted(1.0, draw(0), "a"), [AbortGroup(draw(1))])
    meter.handled(GroupInterrupted(1.0, draw(2), "b"), [])  # it runs on a
    meter.handled(ReplicaLost(2.0, "a"), [])
    for number in range(3):
        meter.handled(ResponseFinished(3.0, draw(number), 0, 10), [])
    assert meter.sums == SpeedSums()
    assert (meter.replicas, meter.kv_capacity) == (2, 300)


def test_the_weights_are_those_of_the_replica_that_tells_them() -> None:
    meter = EngineMeter(PROMPT)
    assert meter.weight_kv_tokens == 0
    meter.handled(ReplicaJoined(0.0, "a", 2, weight_kv_tokens=70), [])
    meter.handled(ReplicaJoined(0.0, "older", 2), [])
    assert meter.weight_kv_tokens == 70
