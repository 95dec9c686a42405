"""The reward queue: complete groups first, lost ones never."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.commands import ScoreResponse
from rollpacker.policy.reward_queue import RewardQueue
from rollpacker.types import DrawId

A, B = DrawId(0, "a"), DrawId(0, "b")


def never(draw: DrawId) -> bool:
    return False


def put(queue: RewardQueue, draw: DrawId, *indices: int) -> None:
    for index in indices:
        queue.put(ScoreResponse(draw, index))


def test_a_complete_group_goes_before_responses_that_came_earlier() -> None:
    queue = RewardQueue(2)
    put(queue, A, 0)
    put(queue, B, 1, 0)
    assert queue.take(3, never) == [
        ScoreResponse(B, 1),
        ScoreResponse(B, 0),
        ScoreResponse(A, 0),
    ]


def test_without_a_limit_everything_goes_at_once() -> None:
    queue = RewardQueue(8)
    put(queue, A, 0, 1, 2)
    assert len(queue.take(0, never)) == 3


def test_what_was_taken_early_is_not_due_again() -> None:
    queue = RewardQueue(2)
    put(queue, A, 0)
    assert queue.take(2, never) == [ScoreResponse(A, 0)]
    put(queue, A, 1)
    assert queue.take(2, never) == [ScoreResponse(A, 1)]


def test_a_group_that_is_let_go_is_not_scored_unless_it_is_complete() -> None:
    queue = RewardQueue(2)
    put(queue, A, 0)
    put(queue, B, 0, 1)  # complete: what it is let go of is its surplus
    queue.let_go(A)
    queue.let_go(B)
    assert [command.draw for command in queue.take(0, never)] == [B, B]


def test_a_complete_group_that_has_lost_is_not_scored() -> None:
    queue = RewardQueue(1)
    put(queue, A, 0)
    put(queue, B, 0)
    assert queue.take(0, A.__eq__) == [ScoreResponse(B, 0)]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4)),
        st.tuples(st.just("let go"), st.integers(0, 4)),
        st.tuples(st.just("answered"), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(0, 3), st.integers(1, 4))
def test_every_response_is_sent_once_or_lost_and_none_waits_while_there_is_room(
    events: list[tuple[str, int]], room: int, width: int
) -> None:
    queue = RewardQueue(width)
    finished: Counter[DrawId] = Counter()
    lost: set[DrawId] = set()
    sent: list[ScoreResponse] = []
    answered = 0
    for kind, number in events:
        draw = DrawId(0, str(number))
        if kind == "put" and draw not in lost and finished[draw] < width:
            queue.put(ScoreResponse(draw, finished[draw]))
            finished[draw] += 1
        elif kind == "let go":
            queue.let_go(draw)
            if finished[draw] < width:
                lost.add(draw)
        elif kind == "answered" and answered < len(sent):
            queue.answered()
            answered += 1
        sent += queue.take(room, never)
        under_way = len(sent) - answered
        assert queue.under_way == under_way
        assert not room or under_way <= room
        waiting = [
            (draw, i)
            for draw, count in finished.items()
            for i in range(count)
            if draw not in lost and ScoreResponse(draw, i) not in sent
        ]
        assert not waiting or under_way == room
    assert len(set(sent)) == len(sent)
