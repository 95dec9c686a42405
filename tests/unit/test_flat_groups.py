"""Dynamic sampling: which groups are trained, deferred and dropped, whatever the timing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.commands import EmitGroup, FinishRound, RequestDraws, ScoreResponse
from rollpacker.policy.events import (
    DrawsAdded,
    Event,
    GroupRestored,
    ReplicaJoined,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.types import Draw, DrawId, RoundKind
from tests.unit.test_round import Engine, Outcome

RESPONSES = 2


@dataclass(frozen=True)
class Case:
    """A round, and what the data holds behind it; lengths and rewards of every prompt."""

    plan: RoundPlan
    launched: int
    lengths: list[list[int]]
    rewards: list[list[float]]
    streams: bool

    @property
    def rules(self) -> TailBatchingRules:
        return TailBatchingRules(
            self.plan.keep, RESPONSES, (2.0,), streams=self.streams, dynamic_sampling=True
        )

    def draws(self) -> list[Draw]:
        return [Draw(0, f"p{i}", (1, 2)) for i in range(len(self.lengths))]

    def is_flat(self, place: int) -> bool:
        return len(set(self.rewards[place])) == 1

    def key(self, place: int) -> tuple[bool, int, int]:
        """Prompts that were added come last, in the order of the data."""
        added = place >= self.launched
        return (added, 0 if added else max(self.lengths[place]), place)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    keep = draw(st.integers(1, 4))
    kind = draw(st.sampled_from([RoundKind.SHORT, RoundKind.LONG]))
    launched = keep + (draw(st.integers(0, keep)) if kind is RoundKind.SHORT else 0)
    total = launched + draw(st.integers(0, 6))
    pair = st.lists(st.integers(1, 6), min_size=2, max_size=2)
    rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2)
    protected = draw(st.sets(st.integers(0, launched - 1), max_size=keep))
    names = frozenset(DrawId(0, f"p{i}") for i in protected if kind is RoundKind.SHORT)
    return Case(
        RoundPlan(0, kind, 0, (), launched, keep, RESPONSES, names),
        launched,
        draw(st.lists(pair, min_size=total, max_size=total)),
        draw(st.lists(rewards, min_size=total, max_size=total)),
        draw(st.booleans()),
    )


class Shell(Engine):
    """The engine of the round's tests, with a data set and with rewards that are given."""

    def __init__(self, case: Case, seed: int, restored: list[EmitGroup]) -> None:
        draws = case.draws()
        launched = draws[: case.launched]
        lengths = {d.id: case.lengths[i] for i, d in enumerate(draws)}
        super().__init__(Round(case.rules, case.plan, launched), lengths, random.Random(seed))
        self.case, self.restored = case, {group.draw: group for group in restored}
        self.left = draws[case.launched :]
        self.taken: list[Draw] = []
        ids = {draw.id for draw in launched}
        for draw in self.restored:  # in the order of the stream
            if draw in ids:
                self.tell(self._restored_event(draw))

    def tell(self, event: Event) -> None:
        handle = self.round.handle
        asked: list[int] = []

        def noting(told: Event) -> list:
            commands = handle(told)
            asked.extend(c.count for c in commands if isinstance(c, RequestDraws))
            return commands

        self.round.handle = noting  # type: ignore[method-assign]
        super().tell(event)
        self.round.handle = handle  # type: ignore[method-assign]
        for count in asked:
            given, self.left = self.left[:count], self.left[count:]
            self.taken += given
            known = [self._restored_event(d.id) for d in given if d.id in self.restored]
            self.tell(DrawsAdded(self.now, count, tuple(given), tuple(known)))

    def _restored_event(self, draw: DrawId) -> GroupRestored:
        return GroupRestored(self.now, draw, tuple(self.lengths[draw]))

    def _score(self) -> None:
        request: ScoreResponse = self.to_score.pop(self.rng.randrange(len(self.to_score)))
        reward = self.case.rewards[int(request.draw.prompt_id[1:])][request.index]
        self.tell(ResponseScored(self.now, request.draw, request.index, reward))


def play(case: Case, seed: int, faults: int = 0, restored: list[EmitGroup] | None = None) -> Shell:
    shell = Shell(case, seed, restored or [])
    shell.tell(ReplicaJoined(0.0, "a", 4))
    shell.tell(ReplicaJoined(0.0, "b", 6))
    shell.run(faults)
    return shell


def finish_of(outcome: Outcome) -> FinishRound:
    assert outcome.finish is not None
    return outcome.finish


def expected_winners(case: Case) -> list[int]:
    """A protected draw has its place; the others race for the rest; a flat group that held a place,
    and a place that nobody fills, is worth one new prompt, which is trained last."""
    keep, names = case.plan.keep, case.plan.protected
    held = [i for i in range(case.launched) if DrawId(0, f"p{i}") in names]
    racers = [i for i in range(case.launched) if i not in held]
    good = sorted((i for i in racers if not case.is_flat(i)), key=case.key)[: keep - len(held)]
    chosen = [*good, *(i for i in held if not case.is_flat(i))]
    added = [i for i in range(case.launched, len(case.lengths)) if not case.is_flat(i)]
    return sorted([*chosen, *added[: keep - len(chosen)]], key=case.key)


@settings(max_examples=400, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), faults=st.integers(0, 6))
def test_places_go_by_race_key_among_the_groups_that_are_not_flat(case, seed, faults) -> None:
    shell = play(case, seed, faults)
    winners = [f"p{place}" for place in expected_winners(case)]
    assert [draw.prompt_id for draw in finish_of(shell.done).winners] == winners
    assert [group.draw for group in shell.done.emitted] == list(finish_of(shell.done).winners)


@settings(max_examples=400, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32), faults=st.integers(0, 6), crash=st.integers(0, 4))
def test_timing_faults_and_a_crash_change_nothing(case, seed, faults, crash) -> None:
    first, other = play(case, seed), play(case, seed + 1, faults)
    resumed = play(case, seed + 2, faults, restored=first.done.emitted[:crash])
    for again in (other, resumed):
        assert again.taken == first.taken
        assert finish_of(again.done).winners == finish_of(first.done).winners
        assert finish_of(again.done).flat == finish_of(first.done).flat
        deferred = [[item.draw for item in finish_of(s.done).deferred] for s in (first, again)]
        assert deferred[0] == deferred[1]


@settings(max_examples=300, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_every_launched_draw_is_trained_deferred_or_dropped_once_and_dropped_only_if_flat(
    case, seed
) -> None:
    shell = play(case, seed)
    finish = finish_of(shell.done)
    launched = [*case.draws()[: case.launched], *shell.taken]
    deferred = [item.draw.id for item in finish.deferred]
    assert sorted([*finish.winners, *deferred, *finish.flat]) == sorted(d.id for d in launched)
    assert all(case.is_flat(int(draw.prompt_id[1:])) for draw in finish.flat)
    assert not any(case.is_flat(int(draw.prompt_id[1:])) for draw in finish.winners)
    if case.plan.kind is RoundKind.LONG:
        assert not finish.deferred
    assert len(finish.winners) == case.plan.keep or not shell.left


def test_nothing_is_aborted_until_enough_groups_are_known_not_to_be_flat() -> None:
    rules = TailBatchingRules(1, 2, (2.0,), dynamic_sampling=True)
    draws = [Draw(0, name, (1, 2)) for name in ("short", "long")]
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 2), draws)
    short, long = (draw.id for draw in draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    for index in (0, 1):
        assert round_.handle(ResponseFinished(1, short, index, 5)) == [ScoreResponse(short, index)]
        assert round_.handle(ResponseFinished(1, long, index, 50)) == [ScoreResponse(long, index)]
    for draw, rewards in ((short, (1.0, 1.0)), (long, (0.0, 1.0))):
        for index in (0, 1):
            commands = round_.handle(ResponseScored(2, draw, index, rewards[index]))
    finish = commands[-1]
    assert isinstance(finish, FinishRound)
    assert (finish.winners, finish.flat, finish.deferred) == ((long,), (short,), ())


@pytest.mark.parametrize("data_left", [0, 1])
def test_a_long_round_takes_the_next_prompt_for_a_flat_group_while_there_is_one(data_left) -> None:
    rules = TailBatchingRules(1, 2, dynamic_sampling=True)
    flat, new = Draw(0, "flat", (1, 2)), Draw(0, "new", (3, 4))
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 2), [flat])
    round_.handle(ReplicaJoined(0, "a", 100))
    commands = []
    for index in (0, 1):
        round_.handle(ResponseFinished(1, flat.id, index, 5))
        commands = round_.handle(ResponseScored(2, flat.id, index, 0.0))
    assert commands == [RequestDraws(1)]
    commands = round_.handle(DrawsAdded(3, 1, (new,)[:data_left]))
    if not data_left:
        assert isinstance(commands[-1], FinishRound)
        assert (commands[-1].winners, commands[-1].flat) == ((), (flat.id,))
        return
    for index in (0, 1):
        round_.handle(ResponseFinished(4, new.id, index, 5))
        commands = round_.handle(ResponseScored(5, new.id, index, float(index)))
    assert isinstance(commands[-1], FinishRound)
    assert (commands[-1].winners, commands[-1].flat) == ((new.id,), (flat.id,))
