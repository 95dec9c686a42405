"""Dynamic sampling: which groups are trained, deferred and dropped, whatever the timing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from rollpacker.policy.tail_batching import Backlog, RoundPlan, TailBatchingRules, plan
from rollpacker.types import Draw, DrawId, RoundKind
from tests.unit.test_round import Engine, Outcome

RESPONSES = 2


@dataclass(frozen=True)
class Case:
    """A round, and what the data holds behind it; lengths and rewards of every prompt."""

    plan: RoundPlan
    launched: int
    lengths: list[list[int]]
    rewards: list[list[float | None]]
    streams: bool
    max_replacements: int

    @property
    def rules(self) -> TailBatchingRules:
        return TailBatchingRules(
            self.plan.keep,
            RESPONSES,
            (2.0,),
            streams=self.streams,
            dynamic_sampling=True,
            max_replacements=self.max_replacements,
        )

    def draws(self) -> list[Draw]:
        return [Draw(0, f"p{i}", (1, 2)) for i in range(len(self.lengths))]

    def is_flat(self, place: int) -> bool:
        """Whether it gives way: two rewards that are equal, and not of the last replacements."""
        first, second = self.rewards[place]
        gives_way = place < self.launched + (self.max_replacements - 1) * self.plan.keep
        return gives_way and first is not None and first == second

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
    rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=2)
    protected = draw(st.sets(st.integers(0, launched - 1), max_size=keep))
    names = frozenset(DrawId(0, f"p{i}") for i in protected if kind is RoundKind.SHORT)
    return Case(
        RoundPlan(0, kind, 0, (), launched, keep, RESPONSES, names),
        launched,
        draw(st.lists(pair, min_size=total, max_size=total)),
        draw(st.lists(rewards, min_size=total, max_size=total)),
        draw(st.booleans()),
        draw(st.integers(1, 3)),
    )


class World(NamedTuple):
    """What every prompt of the data is answered."""

    lengths: dict[DrawId, list[int]]
    rewards: dict[DrawId, Sequence[float | None]]


class Shell(Engine):
    """The engine of the round's tests, with a data set and with rewards that are given."""

    def __init__(
        self,
        round_: Round,
        launched: list[Draw],
        left: list[Draw],
        world: World,
        seed: int,
        restored: list[EmitGroup] | None = None,
    ) -> None:
        super().__init__(round_, world.lengths, random.Random(seed))
        self.rewards = world.rewards
        self.restored = {group.draw: group for group in restored or []}
        self.left = left
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
        reward = self.rewards[request.draw][request.index]
        self.tell(ResponseScored(self.now, request.draw, request.index, reward))


def play(case: Case, seed: int, faults: int = 0, restored: list[EmitGroup] | None = None) -> Shell:
    draws = case.draws()
    launched, left = draws[: case.launched], draws[case.launched :]
    world = World(
        {draw.id: case.lengths[i] for i, draw in enumerate(draws)},
        {draw.id: case.rewards[i] for i, draw in enumerate(draws)},
    )
    round_ = Round(case.rules, case.plan, launched)
    return run(Shell(round_, launched, left, world, seed, restored), faults)


def run(shell: Shell, faults: int = 0) -> Shell:
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


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_however_many_groups_are_flat_a_round_ends_with_a_bounded_number_of_replacements(
    case, seed
) -> None:
    """Every answer is wrong, and the data does not end."""
    bound = case.max_replacements * case.plan.keep
    total = case.launched + bound + 1
    hopeless = replace(case, lengths=[[1, 2]] * total, rewards=[[0.0, 0.0]] * total)
    shell = play(hopeless, seed)
    finish = finish_of(shell.done)
    assert len(shell.taken) <= bound
    assert len(finish.winners) == case.plan.keep
    assert all(not any(group.advantages) for group in shell.done.emitted)


@pytest.mark.parametrize("rewards", [(None, None), (None, 1.0)])
def test_a_group_that_the_reward_service_gave_up_on_is_trained_with_advantages_of_zero(
    rewards,
) -> None:
    rules = TailBatchingRules(1, 2, dynamic_sampling=True)
    draw = Draw(0, "x", (1, 2))
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 2), [draw])
    round_.handle(ReplicaJoined(0, "a", 100))
    for index in (0, 1):
        round_.handle(ResponseFinished(1, draw.id, index, 5))
    round_.handle(ResponseScored(2, draw.id, 0, rewards[0]))
    emitted, finish = round_.handle(ResponseScored(2, draw.id, 1, rewards[1]))
    assert emitted == EmitGroup(draw.id, (0, 1), (0.0, 0.0))
    assert isinstance(finish, FinishRound)
    assert (finish.winners, finish.flat, finish.deferred) == ((draw.id,), (), ())


def trained_in_an_epoch(rules: TailBatchingRules, world: World, seed: int) -> list[list[DrawId]]:
    """The winners of each step until nothing is left; every prompt is always answered the same."""
    left = [Draw(*draw, (1, 2)) for draw in world.lengths]
    queue: list[Draw] = []
    steps: list[list[DrawId]] = []
    while planned := plan(rules, Backlog(len(steps), tuple(queue), len(left))):
        new, left = left[: planned.new_prompts], left[planned.new_prompts :]
        launched = [*planned.queued, *new]
        round_ = Round(rules, planned, launched)
        shell = run(Shell(round_, launched, left, world, seed + len(steps)))
        left = shell.left
        finish = finish_of(shell.done)
        taken = {draw.id for draw in planned.queued}
        queue = [draw for draw in queue if draw.id not in taken]
        queue += [item.draw for item in finish.deferred]
        steps.append(list(finish.winners))
    return steps


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=2, max_size=2),
            st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2),
        ),
        max_size=40,
    ),
    seed=st.integers(0, 2**32),
)
def test_over_a_drained_epoch_exact_trains_every_group_that_is_not_flat_as_synchronous_does(
    answers, seed
) -> None:
    """So their gradients sum to the same, divided by the same P0 and R0."""
    ids = [DrawId(0, f"p{i}") for i in range(len(answers))]
    world = World(
        {draw: lengths for draw, (lengths, _) in zip(ids, answers, strict=True)},
        {draw: rewards for draw, (_, rewards) in zip(ids, answers, strict=True)},
    )
    wanted = sorted(draw for draw in ids if len(set(world.rewards[draw])) == 2)
    unbounded: dict[str, Any] = {"dynamic_sampling": True, "max_replacements": 40}
    synchronous = TailBatchingRules(3, RESPONSES, streams=False, **unbounded)
    exact = TailBatchingRules(3, RESPONSES, (1.75, 2.0), **unbounded)
    for rules in (synchronous, exact):
        steps = trained_in_an_epoch(rules, world, seed)
        assert sorted(draw for step in steps for draw in step) == wanted
        assert all(len(step) <= 3 for step in steps)


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
