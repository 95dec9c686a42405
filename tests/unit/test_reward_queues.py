"""The reward queues of a round: what is sent, and which time counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.commands import ScoreResponse
from rollpacker.policy.reward_meter import RewardSums
from rollpacker.types import DrawId, GraderKind
from services.coordinator.reward_queues import RewardQueues

CODE, MATH = GraderKind.CODE, GraderKind.MATH


class Graders:
    """Queues at a time that tests move; each kind works on one response."""

    def __init__(self) -> None:
        self.queues = RewardQueues(1, lambda draw: False)
        self.now = 0.0
        self.away, self.limit = False, 1

    def event(self, seconds: float) -> list[ScoreResponse]:
        """So much later something happens."""
        self.now += seconds
        return self.queues.due(self.now, self)

    def room(self, kind: GraderKind) -> int:
        return self.limit

    def works_on(self, kind: GraderKind) -> int:
        return 1

    def is_away(self, kind: GraderKind) -> bool:
        return self.away

    def finished(self, name: str, kind: GraderKind = CODE) -> None:
        self.queues.put(kind, ScoreResponse(DrawId(0, name), 0))


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_time_in_which_no_response_is_asked_for_does_not_count(pauses: list[float]) -> None:
    graders = Graders()
    for number, pause in enumerate(pauses):
        graders.finished(str(number))
        assert len(graders.event(pause)) == 1
        graders.queues.answered(CODE, 0.5)
        assert graders.event(1.0) == []
    speed = graders.queues.speeds["code"]
    assert speed.busy.responses == len(pauses)
    assert abs(speed.busy.seconds - len(pauses)) < 1e-3
    assert speed.waited == RewardSums()
    assert sum(speed.took.values()) == len(pauses)


def test_time_in_which_no_service_could_answer_does_not_count() -> None:
    graders = Graders()
    for name in "abc":
        graders.finished(name)
    graders.event(0.0)
    graders.away = True
    graders.event(1.0)
    graders.event(600.0)
    graders.away = False
    graders.event(60.0)
    graders.queues.answered(CODE, 2.0)
    graders.event(2.0)
    assert graders.queues.speeds["code"].waited == RewardSums(1.0, 3.0)


def test_graders_that_are_sent_more_than_they_work_on_are_waited_for() -> None:
    graders = Graders()
    graders.limit = 900
    for name in "abc":
        graders.finished(name)
    assert len(graders.event(0.0)) == 3
    for _ in range(3):
        graders.queues.answered(CODE, 2.0)
        graders.event(2.0)
    assert graders.queues.speeds["code"].waited == RewardSums(2.0, 4.0)


def test_each_kind_has_a_queue_of_its_own() -> None:
    graders = Graders()
    for name in "ab":
        graders.finished(name)
    graders.finished("c", MATH)
    assert [due.draw.prompt_id for due in graders.event(0.0)] == ["a", "c"]
    graders.queues.let_go(CODE, DrawId(0, "b"))  # it is complete, so it is graded all the same
    graders.queues.answered(CODE, None)
    assert [due.draw.prompt_id for due in graders.event(1.0)] == ["b"]
    assert graders.queues.speeds["code"].took == {}
