"""Which replicas a round gives to training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.scale_down import (
    LengthHistory,
    ReplicaLoad,
    RunningResponse,
    ScaleDown,
    ScaleDownRules,
    next_look,
    replicas_to_release,
)

RULES = ScaleDownRules()


@given(
    st.dictionaries(st.integers(0, 60), st.integers(1, 5), max_size=12),
    st.integers(0, 70),
    st.integers(1, 60),
)
def test_the_expected_length_is_that_of_the_definition(counts, generated, cap) -> None:
    longer = [n for n, count in counts.items() for _ in range(count) if n > generated]
    expected = cap
    if longer and generated < cap:
        expected = sum(min(n, cap) for n in longer) / len(longer)
    assert LengthHistory(counts).expected_length(generated, cap) == pytest.approx(expected)


def test_a_release_is_considered_from_a_fifth_on_and_then_every_twentieth() -> None:
    assert not next_look(RULES, 0.19, None)
    assert next_look(RULES, 0.20, None)
    assert not next_look(RULES, 0.24, 0.20)
    assert next_look(RULES, 0.25, 0.20)


def load(name: str, running: int, budget: int = 1000) -> ReplicaLoad:
    return ReplicaLoad(name, budget, (RunningResponse(10, 50),) * running)


def test_the_emptier_half_is_released_when_the_rest_can_hold_everything() -> None:
    history = LengthHistory({90: 1})
    replicas = [load("a", 5), load("b", 1), load("c", 2), load("d", 4)]
    assert replicas_to_release(RULES, replicas, history, cap=100) == ("b", "c")


def test_nothing_is_released_when_the_projected_peak_does_not_fit() -> None:
    history = LengthHistory({90: 1})
    assert replicas_to_release(RULES, [load("a", 6), load("b", 4)], history, cap=100) == ()
    assert replicas_to_release(RULES, [load("a", 5), load("b", 4)], history, cap=100) == ("b",)


def test_a_single_replica_is_never_released() -> None:
    assert replicas_to_release(RULES, [load("a", 0)], LengthHistory({}), cap=100) == ()


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 2000)), max_size=9), st.integers(1, 200)
)
def test_what_is_kept_can_always_hold_what_runs(loads, cap) -> None:
    history = LengthHistory({60: 2, 120: 1})
    replicas = [load(f"r{i}", running, budget) for i, (running, budget) in enumerate(loads)]
    released = replicas_to_release(RULES, replicas, history, cap)
    if released:
        kept = sum(r.kv_budget_tokens for r in replicas if r.replica_id not in released)
        need = sum(len(r.running) for r in replicas) * (10 + history.expected_length(50, cap))
        assert need <= kept * (1 - RULES.margin) + 1e-6
        assert len(released) == len(replicas) // 2


def test_a_round_releases_once_and_asks_for_loads_only_when_a_look_is_due() -> None:
    asked = []
    room = ReplicaLoad("b", 1000, (RunningResponse(10, 5),))
    full = ReplicaLoad("b", 100, (RunningResponse(10, 5),) * 4)

    def loads(second: ReplicaLoad) -> list[ReplicaLoad]:
        asked.append(second)
        return [ReplicaLoad("a", second.kv_budget_tokens, ()), second]

    scale_down = ScaleDown(RULES, {}, response_cap=40)
    assert scale_down.look(0.1, ("a",), lambda: loads(room)) == ()
    assert asked == []
    assert scale_down.look(0.2, ("a",), lambda: loads(full)) == ()
    assert scale_down.look(0.22, ("a",), lambda: loads(room)) == ()
    assert asked == [full]
    assert scale_down.look(0.25, ("a",), lambda: loads(room)) == ("a",)
    assert scale_down.look(0.9, ("a",), lambda: loads(room)) == ()


def test_idle_replicas_are_released_at_once_and_again_without_a_look_at_the_others() -> None:
    scale_down = ScaleDown(ScaleDownRules(idle_only=True), {}, 100)

    def loads() -> list[ReplicaLoad]:
        raise AssertionError("not asked")

    assert scale_down.look(0.01, (), loads) == ()
    assert scale_down.look(0.01, ("a",), loads) == ("a",)
    assert scale_down.look(0.02, ("b", "c"), loads) == ("b", "c")
