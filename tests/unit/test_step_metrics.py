"""The metrics of a step that are more than a sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.types import FinishReason, Response
from services.coordinator.replica_idle import ReplicaIdle
from services.coordinator.step_metrics import _ends_in_loop, idle_metrics


def response(*tokens: int) -> Response:
    return Response(
        response_id="r",
        index=0,
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        finish_reason=FinishReason.LENGTH,
        weight_version=0,
        seed=1,
        segments=(),
    )


def test_a_response_that_ends_in_one_token_over_and_over_is_a_loop() -> None:
    assert _ends_in_loop(response(1, 2, *[7] * 32))
    assert not _ends_in_loop(response(*[7] * 31))
    assert not _ends_in_loop(response(*[7] * 40, 8))


def test_what_neither_rolls_out_nor_trains_is_idle() -> None:
    metrics = {
        "timing_s/step": 10.0,
        "timing_s/rollout": 7.0,
        "trainer/accumulate_seconds": 2.0,
        "trainer/update_seconds": 1.0,
    }
    assert idle_metrics(metrics) == pytest.approx(
        {"idle/rollout_share": 0.3, "idle/trainer_share": 0.7}
    )


def test_a_replica_is_idle_while_no_group_runs_on_it() -> None:
    idle = ReplicaIdle()
    idle.joined("a", 0.0)
    idle.joined("b", 2.0)
    idle.group_started("a", 1.0)
    idle.group_started("a", 2.0)
    idle.group_ended("a", 3.0)
    idle.group_ended("a", 6.0)  # busy from 1 to 6 of 0 to 10
    idle.lost("b", 6.0)  # idle from 2 to 6
    assert idle.share(10.0) == pytest.approx((5.0 + 4.0) / (10.0 + 4.0))


def test_a_round_without_replicas_has_no_bubbles() -> None:
    assert ReplicaIdle().share(5.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)), max_size=30))
def test_the_idle_share_is_a_share(groups: list[tuple[str, float]]) -> None:
    idle, now = ReplicaIdle(), 0.0
    for name in "ab":
        idle.joined(name, now)
    for name, seconds in groups:
        idle.group_started(name, now)
        now += seconds
        idle.group_ended(name, now)
    share = idle.share(now + 1.0)
    assert 0.0 < share <= 1.0
