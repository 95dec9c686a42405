"""The round state machine under any order of events, replica losses and crashes.

`Engine` is a fake of the shell around a round: it knows the length of every response in advance
and carries out commands; the order in which things happen is drawn by hypothesis.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy import round as round_module
from rollpacker.policy.commands import (
    AbortGroup,
    Command,
    EmitGroup,
    FinishRound,
    LaunchGroup,
    ScoreResponse,
)
from rollpacker.policy.events import (
    Event,
    GroupInterrupted,
    GroupRestored,
    ProgressReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.placement import Placement
from rollpacker.policy.round import Round, UnknownDrawError
from rollpacker.policy.round_state import Group, Replica
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, Routing, TailBatchingRules
from rollpacker.types import Draw, DrawId, RoundKind

Lengths = dict[DrawId, list[int]]


@dataclass
class Outcome:
    emitted: list[EmitGroup] = field(default_factory=list)
    aborted: list[DrawId] = field(default_factory=list)
    finish: FinishRound | None = None
    launches: int = 0
    launched: list[LaunchGroup] = field(default_factory=list)
    moves: int = 0


class Engine:
    """Fake: generates one token per running response and tick, in a random order of groups."""

    def __init__(self, round_: Round, lengths: Lengths, rng: random.Random) -> None:
        self.round, self.lengths, self.rng = round_, lengths, rng
        self.running: dict[DrawId, tuple[str, dict[int, int]]] = {}
        self.to_score: list[ScoreResponse] = []
        self.done = Outcome()
        self.now = 0.0

    def tell(self, event: Event) -> None:
        for command in self.round.handle(event):
            match command:
                case LaunchGroup(draw, replica_id, indices):
                    assert draw not in self.running
                    self.running[draw] = (replica_id, dict.fromkeys(indices, 0))
                    self.done.launches += 1
                    self.done.launched.append(command)
                case AbortGroup(draw):
                    self.done.aborted.append(draw)
                    del self.running[draw]
                case ScoreResponse():
                    self.to_score.append(command)
                case EmitGroup():
                    self.done.emitted.append(command)
                case FinishRound():
                    assert self.done.finish is None
                    self.done.finish = command

    def run(self, faults: int = 0, *, rebalances: bool = False) -> Outcome:
        for _ in range(20_000):
            if self.done.finish:
                return self.done
            self.now += 1
            if rebalances:
                self._rebalance()
            if faults and self.rng.random() < 0.05:
                faults -= 1
                self._fault()
            if self.to_score and self.rng.random() < 0.5:
                self._score()
            if self.running:
                self._advance(self.rng.choice(list(self.running)))
        raise AssertionError(f"the round hangs: {self.round.outstanding()}")

    def _rebalance(self) -> None:
        while (found := self.round.group_to_move()) is not None:
            draw, replica_id = found
            assert self.running.pop(draw)[0] == replica_id
            idle = self.round.idle_replicas()
            self.tell(GroupInterrupted(self.now, draw, replica_id))
            assert self.running[draw][0] in idle
            self.done.moves += 1

    def _fault(self) -> None:
        if self.running and self.rng.random() < 0.5:
            draw = self.rng.choice(list(self.running))
            replica_id, _ = self.running.pop(draw)
            self.tell(GroupInterrupted(self.now, draw, replica_id))
            return
        name = self.rng.choice(["a", "b"])
        for draw in [d for d, (replica, _) in self.running.items() if replica == name]:
            del self.running[draw]
        self.tell(ReplicaLost(self.now, name))
        self.tell(ReplicaJoined(self.now, name, 6))

    def _score(self) -> None:
        request = self.to_score.pop(self.rng.randrange(len(self.to_score)))
        reward = None if self.rng.random() < 0.1 else float(self.rng.random() < 0.5)
        self.tell(ResponseScored(self.now, request.draw, request.index, reward))

    def _advance(self, draw: DrawId) -> None:
        _, tokens = self.running[draw]
        for index in list(tokens):
            if draw not in self.running:
                return
            if index not in tokens:
                continue
            if tokens[index] >= self.lengths[draw][index]:
                length = tokens.pop(index)
                if not tokens:
                    del self.running[draw]
                self.tell(ResponseFinished(self.now, draw, index, length))
            else:
                tokens[index] += 1
        if draw in self.running and self.rng.random() < 0.5:
            total = sum(tokens.values())
            self.tell(ProgressReported(self.now, draw, max(tokens.values()), total))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[TailBatchingRules, RoundPlan, list[Draw], Lengths]:
    keep = draw(st.integers(1, 5))
    launched = keep + draw(st.integers(0, keep))
    responses = draw(st.integers(1, 3))
    draws = [Draw(0, f"p{i}", tuple(range(responses)), 0, 0) for i in range(launched)]
    lengths = {
        d.id: draw(st.lists(st.integers(0, 9), min_size=responses, max_size=responses))
        for d in draws
    }
    protected = frozenset(d.id for d in draw(st.sets(st.sampled_from(draws), max_size=keep)))
    rules = TailBatchingRules(keep, responses, (2.0,))
    plan = RoundPlan(0, RoundKind.SHORT, 0, (), launched, keep, responses, protected)
    return rules, plan, draws, lengths


def play(
    case: tuple[TailBatchingRules, RoundPlan, list[Draw], Lengths],
    seed: int,
    *,
    capacities: tuple[int, ...] = (4, 6),
    faults: int = 0,
    restored: tuple[EmitGroup, ...] = (),
    rebalances: bool = False,
) -> Outcome:
    rules, plan, draws, lengths = case
    engine = Engine(Round(rules, plan, draws), lengths, random.Random(seed))
    for group in restored:
        tokens = tuple(lengths[group.draw][index] for index in group.indices)
        engine.tell(GroupRestored(0.0, group.draw, tokens))
    for name, capacity in zip("ab", capacities, strict=False):
        engine.tell(ReplicaJoined(0.0, name, capacity))
    return engine.run(faults, rebalances=rebalances)


def expected_winners(
    case: tuple[TailBatchingRules, RoundPlan, list[Draw], Lengths],
) -> list[DrawId]:
    """The race's definition, word for word: by longest response, ties by launch order."""
    _, plan, draws, lengths = case
    ranked = sorted((max(lengths[d.id]), order, d.id) for order, d in enumerate(draws))
    free = plan.keep - len(plan.protected)
    unprotected = [i for _, _, i in ranked if i not in plan.protected][:free]
    chosen = set(unprotected) | plan.protected
    return [i for _, _, i in ranked if i in chosen]


@settings(max_examples=300, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), faults=st.integers(0, 8))
def test_winners_and_their_order_are_a_pure_function_of_the_responses(case, seed, faults) -> None:
    outcome = play(case, seed, faults=faults)
    assert outcome.finish is not None
    assert list(outcome.finish.winners) == expected_winners(case)
    assert [group.draw for group in outcome.emitted] == expected_winners(case)


@settings(max_examples=100, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), capacity=st.integers(1, 100))
def test_the_number_of_replicas_and_slots_changes_nothing(case, seed, capacity) -> None:
    one = play(case, seed, capacities=(capacity,)).finish
    two = play(case, seed + 1).finish
    assert one is not None
    assert two is not None
    assert one.winners == two.winners
    assert [d.draw for d in one.deferred] == [d.draw for d in two.deferred]


@settings(max_examples=200, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), faults=st.integers(0, 4))
def test_a_launched_draw_is_emitted_or_deferred_exactly_once(case, seed, faults) -> None:
    _, _, draws, _ = case
    outcome = play(case, seed, faults=faults)
    assert outcome.finish is not None
    seen = [*outcome.finish.winners, *(d.draw.id for d in outcome.finish.deferred)]
    assert sorted(seen) == sorted(d.id for d in draws)
    assert all(d.draw.level == 1 for d in outcome.finish.deferred)
    assert [g.draw for g in outcome.emitted] == list(outcome.finish.winners)


@settings(max_examples=200, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), faults=st.integers(0, 4))
def test_groups_that_an_idle_replica_takes_over_change_no_winner(case, seed, faults) -> None:
    outcome = play(case, seed, faults=faults, capacities=(4, 0), rebalances=True)
    assert outcome.finish is not None
    assert list(outcome.finish.winners) == expected_winners(case)
    assert [d.draw for d in outcome.finish.deferred] == [
        d.draw for d in play(case, seed).finish.deferred
    ]


@settings(max_examples=200, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), faults=st.integers(0, 4))
def test_an_emitted_group_has_exactly_r0_responses(case, seed, faults) -> None:
    rules, _, _, _ = case
    for group in play(case, seed, faults=faults).emitted:
        assert group.indices == tuple(range(rules.responses_per_prompt))
        assert len(group.advantages) == rules.responses_per_prompt


@settings(max_examples=200, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32), crash_after=st.integers(0, 5))
def test_after_a_crash_the_groups_in_the_stream_stay_winners(case, seed, crash_after) -> None:
    before = play(case, seed)
    again = play(case, seed + 1, restored=tuple(before.emitted[:crash_after]))
    assert before.finish is not None
    assert again.finish is not None
    assert again.finish.winners == before.finish.winners
    assert [d.draw for d in again.finish.deferred] == [d.draw for d in before.finish.deferred]
    assert [g.draw for g in again.emitted] == [g.draw for g in before.emitted[crash_after:]]


@settings(max_examples=200, deadline=None)
@given(case=rounds(), seed=st.integers(0, 2**32))
def test_generated_tokens_cover_the_trained_ones(case, seed) -> None:
    _, _, _, lengths = case
    finish = play(case, seed).finish
    assert finish is not None
    trained = sum(sum(lengths[draw]) for draw in finish.winners)
    everything = sum(sum(tokens) for tokens in lengths.values())
    assert trained <= finish.generated_tokens <= everything


def paper_round(keep: int = 2, launched: int = 3, responses: int = 2) -> Round:
    rules = TailBatchingRules(keep, responses, (1.5,), 1.5, RaceKind.ARRIVAL, keeps_seeds=False)
    draws = [Draw(0, f"p{i}", (1, 2, 3)) for i in range(launched)]
    plan = RoundPlan(0, RoundKind.SHORT, 0, (), launched, keep, 3)
    return Round(rules, plan, draws)


def test_in_the_paper_mode_the_first_r0_responses_count_and_the_surplus_is_aborted() -> None:
    round_ = paper_round()
    draw = DrawId(0, "p1")
    round_.handle(ReplicaJoined(0, "a", 100))
    round_.handle(ResponseFinished(1, draw, 2, 50))
    commands = round_.handle(ResponseFinished(2, draw, 0, 10))
    assert AbortGroup(draw) in commands
    round_.handle(ResponseScored(3, draw, 2, 1.0))
    emitted = round_.handle(ResponseScored(3, draw, 0, 0.0))
    assert [c.indices for c in emitted if isinstance(c, EmitGroup)] == [(0, 2)]


def test_in_the_paper_mode_the_round_ends_with_the_p0th_prompt_to_arrive() -> None:
    round_ = paper_round()
    round_.handle(ReplicaJoined(0, "a", 100))
    commands = []
    for name in ("p2", "p0"):
        for index in (0, 1):
            commands += round_.handle(ResponseFinished(1, DrawId(0, name), index, 100))
            commands += round_.handle(ResponseScored(1, DrawId(0, name), index, 1.0))
    assert AbortGroup(DrawId(0, "p1")) in commands
    finish = commands[-1]
    assert isinstance(finish, FinishRound)
    assert finish.winners == (DrawId(0, "p2"), DrawId(0, "p0"))
    assert [d.draw.level for d in finish.deferred] == [1]


def test_a_loser_is_aborted_before_the_race_is_over_once_it_cannot_win() -> None:
    rules = TailBatchingRules(1, 1, (2.0,))
    draws = [Draw(0, name, (1,)) for name in ("slow", "fast")]
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 1), draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    assert round_.handle(ProgressReported(1, DrawId(0, "slow"), 7, 7)) == []
    commands = round_.handle(ResponseFinished(2, DrawId(0, "fast"), 0, 5))
    assert commands == [ScoreResponse(DrawId(0, "fast"), 0), AbortGroup(DrawId(0, "slow"))]


def test_a_finished_group_waits_for_those_that_may_still_be_shorter() -> None:
    rules = TailBatchingRules(1, 1, (2.0,))
    draws = [Draw(0, name, (1,)) for name in ("long", "short")]
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 1), draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    round_.handle(ResponseFinished(1, DrawId(0, "long"), 0, 50))
    round_.handle(ResponseScored(2, DrawId(0, "long"), 0, 1.0))
    assert not round_.over
    commands = round_.handle(ResponseFinished(9, DrawId(0, "short"), 0, 3))
    assert ScoreResponse(DrawId(0, "short"), 0) in commands
    finish = round_.handle(ResponseScored(10, DrawId(0, "short"), 0, 0.0))[-1]
    assert isinstance(finish, FinishRound)
    assert finish.winners == (DrawId(0, "short"),)
    assert (finish.rollout_seconds, finish.race_wait_seconds) == (9, 8)


@pytest.mark.parametrize("relaunched", [False, True])
def test_late_news_of_a_lost_replica_counts_once(relaunched: bool) -> None:
    rules = TailBatchingRules(1, 2)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 2), [Draw(0, "x", (1, 2))])
    draw = DrawId(0, "x")
    round_.handle(ReplicaJoined(0, "a", 8))
    round_.handle(ReplicaLost(1, "a"))
    if relaunched:
        assert round_.handle(ReplicaJoined(2, "b", 8)) == [LaunchGroup(draw, "b", (0, 1))]
    assert round_.handle(ResponseFinished(3, draw, 0, 5)) == [ScoreResponse(draw, 0)]
    assert round_.handle(ResponseFinished(4, draw, 0, 5)) == []
    assert round_.handle(ResponseFinished(5, draw, 1, 7)) == [ScoreResponse(draw, 1)]
    if not relaunched:
        assert round_.handle(ReplicaJoined(6, "b", 8)) == []
    round_.handle(ResponseScored(7, draw, 0, 1.0))
    assert isinstance(round_.handle(ResponseScored(8, draw, 1, 0.0))[-1], FinishRound)


def test_reward_latency_never_decides_who_is_kept() -> None:
    rules = TailBatchingRules(1, 1, (2.0,))
    draws = [Draw(0, name, (1,)) for name in ("x", "y")]
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 1), draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    round_.handle(ResponseFinished(1, DrawId(0, "x"), 0, 4))
    round_.handle(ResponseFinished(1, DrawId(0, "y"), 0, 6))
    round_.handle(ResponseScored(2, DrawId(0, "y"), 0, 1.0))
    assert not round_.over
    finish = round_.handle(ResponseScored(60, DrawId(0, "x"), 0, 1.0))[-1]
    assert isinstance(finish, FinishRound)
    assert finish.winners == (DrawId(0, "x"),)


def test_a_round_that_does_not_stream_scores_only_after_the_last_response() -> None:
    rules = TailBatchingRules(2, 1, streams=False)
    draws = [Draw(0, name, (1,)) for name in ("x", "y")]
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 2, 2, 1), draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    assert round_.handle(ResponseFinished(1, DrawId(0, "x"), 0, 4)) == []
    commands = round_.handle(ResponseFinished(2, DrawId(0, "y"), 0, 6))
    assert commands == [ScoreResponse(DrawId(0, "x"), 0), ScoreResponse(DrawId(0, "y"), 0)]


def test_carried_tokens_are_not_generated_again_but_count_in_the_race() -> None:
    rules = TailBatchingRules(1, 2, (2.0,))
    draws = [Draw(0, name, (1, 2)) for name in ("drafted", "fast")]
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 2), draws)
    drafted, fast = (draw.id for draw in draws)
    round_.handle(ReplicaJoined(0, "a", 100))
    round_.handle(ResponseFinished(1, fast, 0, 5))
    round_.handle(ResponseFinished(1, fast, 1, 4, carried_tokens=3))
    commands = round_.handle(ProgressReported(1, drafted, 20, 30, carried_tokens=25))
    assert commands == [AbortGroup(drafted)]
    for index in (0, 1):
        commands = round_.handle(ResponseScored(2, fast, index, 1.0))
    finish = commands[-1]
    assert isinstance(finish, FinishRound)
    assert finish.generated_tokens == (5 + 1) + (30 - 25)
    assert finish.deferred[0].response_tokens == (15, 15)


def test_a_moved_response_counts_each_decoded_token_once() -> None:
    rules = TailBatchingRules(1, 1)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 1), [Draw(0, "x", (1,))])
    draw = DrawId(0, "x")
    round_.handle(ReplicaJoined(0, "a", 8))
    round_.handle(ProgressReported(1, draw, 30, 30))
    assert round_.handle(ReplicaDraining(2, "a")) == []
    assert round_.handle(GroupInterrupted(2, draw, "a")) == []  # not to the draining one again
    assert round_.handle(ReplicaJoined(3, "b", 8)) == [LaunchGroup(draw, "b", (0,))]
    round_.handle(ResponseFinished(4, draw, 0, 50, carried_tokens=30))
    finish = round_.handle(ResponseScored(5, draw, 0, 1.0))[-1]
    assert isinstance(finish, FinishRound)
    assert finish.generated_tokens == 50


def test_late_news_of_a_lost_replica_interrupts_no_group_that_runs_elsewhere() -> None:
    round_ = Round(
        TailBatchingRules(1, 1), RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 1), [Draw(0, "x", (1,))]
    )
    draw = DrawId(0, "x")
    assert round_.handle(ReplicaJoined(0, "a", 8)) == [LaunchGroup(draw, "a", (0,))]
    round_.handle(ReplicaJoined(0, "b", 8))
    assert round_.handle(ReplicaLost(1, "a")) == [LaunchGroup(draw, "b", (0,))]
    assert round_.handle(GroupInterrupted(2, draw, "a")) == []
    assert round_.handle(GroupInterrupted(3, draw, "b")) == [LaunchGroup(draw, "b", (0,))]


def test_a_draining_replica_that_is_lost_gives_its_groups_up() -> None:
    rules = TailBatchingRules(1, 1)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 1), [Draw(0, "x", (1,))])
    round_.handle(ReplicaJoined(0, "a", 8))
    round_.handle(ReplicaJoined(0, "b", 4))
    round_.handle(ReplicaDraining(1, "a"))
    assert round_.handle(ReplicaLost(2, "a")) == [LaunchGroup(DrawId(0, "x"), "b", (0,))]


def test_an_idle_replica_takes_a_group_that_is_larger_than_its_capacity() -> None:
    rules = TailBatchingRules(1, 4)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 4), [Draw(0, "x", (1,) * 4)])
    commands = round_.handle(ReplicaJoined(0, "a", 2))
    assert commands == [LaunchGroup(DrawId(0, "x"), "a", (0, 1, 2, 3))]


def test_the_longest_group_runs_first_where_the_fewest_tokens_are_outstanding() -> None:
    rules = TailBatchingRules(4, 1)
    draws = [Draw(0, name, (1,)) for name in ("a", "b", "c", "d")]
    expected = {DrawId(0, "a"): 10, DrawId(0, "b"): 90, DrawId(0, "c"): 30, DrawId(0, "d"): 30}
    plan = RoundPlan(0, RoundKind.LONG, 0, (), 4, 4, 1)
    round_ = Round(rules, plan, draws, expected)
    commands = [
        *round_.handle(ReplicaJoined(0, "one", 1)),
        *round_.handle(ReplicaJoined(0, "two", 100)),
    ]
    assert commands == [
        LaunchGroup(DrawId(0, "b"), "one", (0,)),
        LaunchGroup(DrawId(0, "c"), "two", (0,)),
        LaunchGroup(DrawId(0, "d"), "two", (0,)),
        LaunchGroup(DrawId(0, "a"), "two", (0,)),
    ]


class _PlacedByDefinition(Placement):
    """Looks at every replica for every group: what `candidates` has to come to."""

    def launch(self) -> list[Command]:
        commands: list[Command] = []
        while self.has_waiting():
            group = self._queue[0]
            found = [
                (-self._queue_of(replica), replica.room(), name)
                for name, replica in self._replicas.items()
                if self._takes(replica, group)
            ]
            if not found:
                break
            group.begin_launch(max(found)[2])
            replica = self._replicas[group.replica_id]
            replica.running.add(self._queue.popleft().draw.id)
            replica.used += len(group.missing())
            replica.turns += 1
            commands.append(LaunchGroup(group.draw.id, group.replica_id, group.missing()))
        return commands

    def _queue_of(self, replica: Replica) -> int:
        in_turn = self._routing is Routing.ROUND_ROBIN
        return replica.turns if in_turn else self._outstanding_of(replica)

    def _takes(self, replica: Replica, group: Group) -> bool:
        if replica.draining:
            return False
        limit = replica.kv_budget_tokens
        tokens = self._outstanding_of(replica) + group.outstanding_tokens()
        has_room = replica.room() >= len(group.missing()) and not (limit and tokens > limit)
        return has_room or not replica.running


@settings(max_examples=200, deadline=None)
@given(
    case=rounds(),
    seed=st.integers(0, 2**32),
    routing=st.sampled_from(Routing),
    replicas=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=5),
    data=st.data(),
)
def test_groups_are_placed_as_if_every_replica_were_looked_at(
    case, seed, routing, replicas, data
) -> None:
    rules, plan, draws, lengths = case
    rules = dataclasses.replace(rules, routing=routing)
    tokens = st.integers(1, 12)
    expected = {draw.id: data.draw(tokens) for draw in draws}
    launched = []
    for kind in (Placement, _PlacedByDefinition):
        with mock.patch.object(round_module, "Placement", kind):
            engine = Engine(Round(rules, plan, draws, expected), lengths, random.Random(seed))
        for place, (capacity, budget) in enumerate(replicas):
            name = "ab"[place] if place < 2 else f"r{place}"
            follow = place < len(replicas) - 1 and seed % 2 == 0
            engine.tell(ReplicaJoined(0.0, name, capacity, budget, others_follow=follow))
        engine.run(faults=4)
        launched.append(engine.done.launched)
    assert launched[0] == launched[1]


def test_a_group_waits_until_its_tokens_fit_the_kv_budget_of_a_replica() -> None:
    rules = TailBatchingRules(2, 1)
    draws = [Draw(0, name, (1,)) for name in ("x", "y")]
    expected = dict.fromkeys((draw.id for draw in draws), 60)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 2, 2, 1), draws, expected)
    first = round_.handle(ReplicaJoined(0, "a", 100, kv_budget_tokens=100))
    assert first == [LaunchGroup(DrawId(0, "x"), "a", (0,))]
    commands = round_.handle(ResponseFinished(1, DrawId(0, "x"), 0, 20))
    assert LaunchGroup(DrawId(0, "y"), "a", (0,)) in commands


def test_what_history_expects_changes_no_winner() -> None:
    rules = TailBatchingRules(1, 1, (2.0,))
    draws = [Draw(0, name, (1,)) for name in ("x", "y")]
    plan = RoundPlan(0, RoundKind.SHORT, 0, (), 2, 1, 1)
    for expected in ({}, {DrawId(0, "y"): 99}):
        round_ = Round(rules, plan, draws, expected)
        round_.handle(ReplicaJoined(0, "a", 100))
        for name in ("y", "x"):
            round_.handle(ResponseFinished(1, DrawId(0, name), 0, 7))
        finish = round_.handle(ResponseScored(2, DrawId(0, "x"), 0, 1.0))[-1]
        assert isinstance(finish, FinishRound)
        assert finish.winners == (DrawId(0, "x"),)


def test_more_replicas_than_prompts_leave_some_idle() -> None:
    rules = TailBatchingRules(1, 1)
    round_ = Round(rules, RoundPlan(0, RoundKind.LONG, 0, (), 1, 1, 1), [Draw(0, "x", (1,))])
    assert len(round_.handle(ReplicaJoined(0, "a", 8))) == 1
    assert round_.handle(ReplicaJoined(0, "b", 8)) == []


def test_an_idle_replica_takes_the_group_with_most_unfinished_responses_over() -> None:
    draws = [Draw(0, name, (1, 1)) for name in ("x", "y", "z")]
    x, y, z = (draw.id for draw in draws)
    round_ = Round(TailBatchingRules(3, 2), RoundPlan(0, RoundKind.LONG, 0, (), 3, 3, 2), draws)
    round_.handle(ReplicaJoined(0, "busy", 4))
    round_.handle(ReplicaJoined(0, "idle", 1))
    assert round_.group_to_move() is None  # z runs on the other
    round_.handle(ResponseFinished(1, x, 0, 5))
    round_.handle(ResponseFinished(1, z, 0, 5))
    assert round_.group_to_move() is None
    round_.handle(ResponseFinished(1, z, 1, 5))
    assert round_.idle_replicas() == ("idle",)
    assert round_.group_to_move() == (y, "busy")
    assert round_.handle(GroupInterrupted(2, y, "busy")) == [LaunchGroup(y, "idle", (0, 1))]
    assert round_.group_to_move() is None
    round_.handle(ReplicaDraining(3, "idle"))
    assert round_.idle_replicas() == ()


def test_an_event_for_an_unknown_draw_is_an_error() -> None:
    with pytest.raises(UnknownDrawError):
        paper_round().handle(ResponseFinished(0, DrawId(3, "nobody"), 0, 1))


def test_the_same_draw_twice_is_refused() -> None:
    rules = TailBatchingRules(2, 1)
    plan = RoundPlan(0, RoundKind.LONG, 0, (), 2, 2, 1)
    with pytest.raises(ValueError, match="twice"):
        Round(rules, plan, [Draw(0, "x", (1,)), Draw(0, "x", (2,))])


def test_loads_tell_what_runs_where_and_nothing_while_a_group_waits() -> None:
    draws = [Draw(0, name, (1, 2)) for name in "abc"]
    plan = RoundPlan(0, RoundKind.LONG, 0, (), 3, 3, 2)
    round_ = Round(TailBatchingRules(3, 2), plan, draws)
    prompt_tokens = {draw.id: 7 for draw in draws}
    round_.handle(ReplicaJoined(0, "left", 2, 100))
    round_.handle(ReplicaJoined(0, "right", 2, 100))
    assert round_.replica_loads(prompt_tokens) == []
    a, b, c = (draw.id for draw in draws)
    round_.handle(ProgressReported(1, a, 5, 10))
    round_.handle(ResponseFinished(2, b, 0, 3))
    round_.handle(ResponseFinished(2, b, 1, 3))
    assert round_.finished_share == 2 / 6
    loads = {load.replica_id: load for load in round_.replica_loads(prompt_tokens)}
    assert {r.generated_tokens for r in loads["left"].running + loads["right"].running} == {0, 5}
    assert [r.prompt_tokens for r in loads["left"].running] == [7, 7]
    round_.handle(ReplicaDraining(3, "left"))
    assert [load.replica_id for load in round_.replica_loads(prompt_tokens)] == ["right"]


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (Routing.LEAST_TOKENS, {"a": "right", "b": "left", "c": "left", "d": "left"}),
        (Routing.ROUND_ROBIN, {"a": "right", "b": "left", "c": "right", "d": "left"}),
    ],
)
def test_a_long_group_keeps_others_off_its_replica_unless_they_go_round(routing, expected) -> None:
    draws = [Draw(0, name, (1, 2)) for name in "abcd"]
    plan = RoundPlan(0, RoundKind.LONG, 0, (), 4, 4, 2)
    lengths = {draw.id: 100 if draw.prompt_id == "a" else 10 for draw in draws}
    round_ = Round(TailBatchingRules(4, 2, routing=routing), plan, draws, lengths)
    assert round_.handle(ReplicaJoined(0, "left", 100, others_follow=True)) == []
    commands = round_.handle(ReplicaJoined(0, "right", 100))
    assert {c.draw.prompt_id: c.replica_id for c in commands} == expected


def test_responses_that_a_group_lets_go_of_are_told_with_what_they_had() -> None:
    rules = TailBatchingRules(1, 2, (2.0,), 2.0, RaceKind.ARRIVAL, keeps_seeds=False)
    draw = Draw(0, "p", (1, 2, 3, 4))
    round_ = Round(rules, RoundPlan(0, RoundKind.SHORT, 0, (), 1, 1, 4), [draw])
    round_.handle(ReplicaJoined(0.0, "a", 4))
    round_.handle(ProgressReported(1.0, draw.id, 7, 24))
    round_.handle(ResponseFinished(2.0, draw.id, 3, 7))
    round_.handle(ResponseFinished(3.0, draw.id, 1, 5))
    round_.handle(ResponseScored(4.0, draw.id, 3, 1.0))
    *_, finish = round_.handle(ResponseScored(4.0, draw.id, 1, 0.0))
    assert isinstance(finish, FinishRound)
    assert finish.cut_tokens == (6, 6)  # 24 - 7 - 5 tokens, shared by the two that were left
