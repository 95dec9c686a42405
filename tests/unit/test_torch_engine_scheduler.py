"""Who runs: the scheduler's invariants, under any sequence of arrivals, ends and aborts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine import GenerationRequest
from services.rollout.torch_engine.responses import Group, ResponseState
from services.rollout.torch_engine.scheduler import Scheduler

BUDGET = 200
SLOTS = 4


def response(arrival: int, prompt: int = 5, cap: int = 50, carried: int = 0) -> ResponseState:
    request = GenerationRequest(
        request_id=str(arrival),
        prompt_token_ids=(1,) * prompt,
        seed=arrival,
        temperature=1.0,
        max_response_tokens=cap,
        stop_token_ids=frozenset(),
    )
    return ResponseState(
        request, Group(lambda _: None, 16), arrival, [1] * carried, [-1.0] * carried, 0
    )


class World:
    """A scheduler, and an engine that only counts."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SLOTS, BUDGET)
        self.waiting: list[ResponseState] = []
        self.arrivals = 0
        self.ended = 0

    def submit(self, prompt: int, cap: int, carried: int) -> None:
        new = response(self.arrivals, prompt, cap, min(carried, cap - 1))
        self.arrivals += 1
        self.waiting.append(new)
        self.scheduler.submit(new)

    def end(self, chosen: ResponseState) -> None:
        self.scheduler.leave(chosen)
        self.ended += 1

    def abort_waiting(self, chosen: ResponseState) -> None:
        self.scheduler.withdraw(chosen)
        self.waiting.remove(chosen)
        self.ended += 1

    def step(self) -> None:
        before = {id(each): each.response_tokens(self.scheduler.step) for each in self.running()}
        plan = self.scheduler.plan()
        for lost in plan.preempted:
            sampled = before[id(lost)] - len(lost.token_ids)
            lost.token_ids += [1] * sampled
            self.scheduler.submit(lost)
            self.waiting.append(lost)
        for new in plan.admitted:
            self.waiting.remove(new)
        self.check()
        self.scheduler.advance()
        for each in self.running():
            if each.response_tokens(self.scheduler.step) == each.request.max_response_tokens:
                self.end(each)

    def running(self) -> list[ResponseState]:
        return self.scheduler.running()

    def check(self) -> None:
        running, step = self.running(), self.scheduler.step
        assert self.scheduler.held_tokens == sum(each.held_tokens(step) for each in running)
        assert self.scheduler.held_tokens <= BUDGET
        assert self.scheduler.running_count == len(running) <= SLOTS
        assert self.scheduler.waiting_count == len(self.waiting)
        assert len({each.slot for each in running}) == len(running)
        assert all(each.running and 0 <= each.slot < SLOTS for each in running)
        assert not any(each.running for each in self.waiting)
        if running and self.waiting:
            assert max(running).arrival < min(self.waiting).arrival
        assert running or not self.waiting
        assert running == sorted(running)


submissions = st.tuples(
    st.just("submit"), st.integers(1, 60), st.integers(1, 140), st.integers(0, 60)
)
choices = st.tuples(st.sampled_from(["end", "abort"]), st.integers(0, 9))


@given(st.lists(st.one_of(submissions, choices, st.just(("step",))), max_size=120))
def test_every_response_ends_within_budget_and_in_order_of_arrival(actions):
    world = World()
    for kind, *values in actions:
        if kind == "submit":
            world.submit(*values)
        elif kind == "step":
            world.step()
        elif kind == "end" and world.running():
            world.end(world.running()[values[0] % len(world.running())])
        elif kind == "abort" and world.waiting:
            world.abort_waiting(world.waiting[values[0] % len(world.waiting)])
    steps = 0
    while world.ended < world.arrivals:
        world.step()
        steps += 1
        assert steps <= 141 * world.arrivals
    assert world.scheduler.held_tokens == 0


def test_the_newest_response_loses_its_cache_first():
    world = World()
    for _ in range(3):
        world.submit(40, 100, 0)
    for _ in range(30):
        world.step()
    assert world.scheduler.preemption_count == 1
    assert [each.arrival for each in world.running()] == [0, 1]
    assert [each.arrival for each in world.waiting] == [2]


def test_admission_leaves_room_to_grow():
    """Three would fit now, but not for long."""
    world = World()
    for _ in range(3):
        world.submit(60, 100, 0)
    world.step()
    assert len(world.running()) == 2
