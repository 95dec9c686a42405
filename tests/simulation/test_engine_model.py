"""The replica model against a replica that decodes token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.simulation.engine_model import ReplicaModel, RunningResponse
from rollpacker.simulation.engine_speed import EngineSpeed, engine_speed
from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.types import DrawId

SPEED = EngineSpeed(0.01, 1e-3, 1e-6, 1e-5, kv_capacity=10_000)


def responses(lengths: list[int], name: str = "a", prompt_tokens: int = 5) -> list[RunningResponse]:
    return [
        RunningResponse(DrawId(0, name), index, length, prompt_tokens)
        for index, length in enumerate(lengths)
    ]


def run(replica: ReplicaModel) -> list[tuple[str, int, float]]:
    """(draw, index, seconds) in the order of finishing."""
    finished = []
    while replica.next_event_at() < math.inf:
        for reached in replica.run_to_event():
            assert reached.finished
            response = reached.response
            assert reached.tokens == response.length
            finished.append((response.draw.prompt_id, response.index, replica.now))
    return finished


def token_by_token(speed: EngineSpeed, lengths: list[int], prompt_tokens: int) -> dict[int, float]:
    now = prompt_tokens * speed.prefill_seconds
    ends, position = {}, 0
    running = dict(enumerate(lengths))
    while running:
        kv = len(running) * (prompt_tokens + position)
        now += speed.step_seconds(len(running), kv)
        position += 1
        for index in [i for i, length in running.items() if length == position]:
            ends[index] = now
            del running[index]
    return ends


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_the_closed_form_times_are_those_of_decoding_token_by_token(lengths: list[int]) -> None:
    replica = ReplicaModel("r", SPEED)
    replica.launch(0.0, responses(lengths))
    ends = {index: at for _, index, at in run(replica)}
    assert ends == pytest.approx(token_by_token(SPEED, lengths, 5))


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(70, 300),
)
@settings(max_examples=60)
def test_every_response_ends_once_and_evictions_decode_nothing_twice(
    groups: list[list[int]], capacity: int
) -> None:
    speed = EngineSpeed(0.01, 1e-3, 1e-6, 1e-5, kv_capacity=capacity)
    replica = ReplicaModel("r", speed)
    for number, lengths in enumerate(groups):
        replica.launch(0.0, responses(lengths, str(number)))
    finished = run(replica)
    wanted = [(str(n), i) for n, lengths in enumerate(groups) for i in range(len(lengths))]
    assert sorted((draw, index) for draw, index, _ in finished) == sorted(wanted)
    assert replica.decoded_tokens == sum(map(sum, groups))
    assert replica.kv_tokens == 0
    assert not replica.groups


def test_the_kv_cache_never_holds_more_than_its_capacity() -> None:
    speed = EngineSpeed(0.01, 1e-3, 1e-6, 1e-5, kv_capacity=200)
    replica = ReplicaModel("r", speed)
    replica.launch(0.0, responses([50] * 8))
    while replica.next_event_at() < math.inf:
        replica.run_to_event()
        assert replica.kv_tokens <= 200
    assert replica.preemptions > 0


def test_an_evicted_response_costs_a_prefill_when_it_returns() -> None:
    roomy = ReplicaModel("r", EngineSpeed(0.01, 0.0, 0.0, 1e-5, kv_capacity=1000))
    tight = ReplicaModel("t", EngineSpeed(0.01, 0.0, 0.0, 1e-5, kv_capacity=150))
    for replica in (roomy, tight):
        replica.launch(0.0, responses([40] * 4))
    assert run(tight)[-1][2] > run(roomy)[-1][2]
    assert tight.preemptions > 0


def test_carried_tokens_are_prefilled_not_decoded() -> None:
    replica = ReplicaModel("r", SPEED)
    (response,) = responses([100])
    response.tokens = 60
    replica.launch(0.0, [response])
    run(replica)
    assert replica.decoded_tokens == 40


def test_an_abort_gives_back_the_tokens_so_far_and_frees_the_cache() -> None:
    replica = ReplicaModel("r", SPEED)
    replica.launch(0.0, responses([100, 200]))
    dropped = replica.abort(0.5, DrawId(0, "a"))
    assert {response.tokens for response in dropped} == {replica.step}
    assert replica.kv_tokens == 0
    assert replica.next_event_at() == math.inf


def heard(replica: ReplicaModel) -> list[tuple[int, int, bool]]:
    """(index, tokens, whether it has finished) of every event until the replica is idle."""
    seen = []
    while replica.next_event_at() < math.inf:
        seen += [(r.response.index, r.tokens, r.finished) for r in replica.run_to_event()]
    return seen


def test_a_response_is_heard_of_at_the_tokens_that_are_watched_for_and_at_each_beyond() -> None:
    replica = ReplicaModel("r", SPEED)
    replica.launch(0.0, responses([10, 23]))
    assert replica.watch(20) == []
    beyond = [(1, tokens, False) for tokens in (20, 21, 22)]
    assert heard(replica) == [(0, 10, True), *beyond, (1, 23, True)]


def test_whoever_has_the_tokens_when_fewer_are_watched_for_is_told_at_once() -> None:
    replica = ReplicaModel("r", SPEED)
    ahead, behind = responses([30], "ahead"), responses([30], "behind")
    behind[0].is_watched = False
    replica.launch(0.0, ahead)
    replica.launch(replica.now, behind)
    replica.watch(25)
    replica.advance(replica.now + 15 * SPEED.step_seconds(2, 100))
    assert 10 < replica.step < 25
    assert [(r.response, r.tokens) for r in replica.watch(10)] == [(ahead[0], replica.step)]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=1, max_size=8),
    st.integers(1, 30),
)
def test_watching_changes_no_time(lengths: list[tuple[int, int]], tokens: int) -> None:
    """Also where evicted responses come back with the tokens that they had."""
    tight = replace(SPEED, kv_capacity=60)
    ends = []
    for watches in (False, True):
        replica = ReplicaModel("r", tight)
        for number, (length, carried) in enumerate(lengths):
            one = responses([length], str(number))
            one[0].tokens = min(carried, length - 1)
            replica.launch(0.0, one)
        if watches:
            replica.watch(tokens)
        finished = {}
        while replica.next_event_at() < math.inf:
            for reached in replica.run_to_event():
                assert reached.finished or reached.tokens >= tokens
                if reached.finished:
                    finished[reached.response.draw] = replica.now
        ends.append(finished)
    assert ends[1] == pytest.approx(ends[0])
    assert len(ends[0]) == len(lengths)


def test_a_larger_tensor_parallel_size_decodes_faster_and_holds_more() -> None:
    parameters = load_parameters()
    two, four = (engine_speed(parameters, MODELS["32B"], size) for size in (2, 4))
    assert four.step_seconds(1, 0) < two.step_seconds(1, 0)
    assert four.kv_capacity > 2 * two.kv_capacity
    assert two.kv_capacity == pytest.approx(238_000, rel=0.01)


def test_a_size_that_cannot_hold_a_response_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size: 1 leaves 32B"):
        engine_speed(load_parameters(), MODELS["32B"], 1)
