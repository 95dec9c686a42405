"""A round that is written down can be played again, command by command."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.advantages import AdvantageRules, OverlongShaping
from rollpacker.policy.commands import Command
from rollpacker.policy.events import DrawsAdded, Event, GroupRestored, ReplicaJoined
from rollpacker.policy.reward_meter import RewardSpeed, RewardsSeen, RewardSums
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, TailBatchingRules
from rollpacker.round_log import (
    RoundArguments,
    RoundLog,
    RoundLogError,
    event_from_json,
    read_round,
    replayed,
    to_json,
)
from rollpacker.types import Draw, DrawId, RoundKind
from tests.unit.test_round import Engine, Lengths

DRAWS = tuple(Draw(0, str(row), (row, row + 1), first_step=3) for row in range(6))
ARGUMENTS = RoundArguments(
    TailBatchingRules(
        4,
        2,
        (1.5,),
        advantages=AdvantageRules(overlong=OverlongShaping(40, 8, 0.5)),
    ),
    RoundPlan(3, RoundKind.SHORT, 0, DRAWS[:2], 4, 4, 2, frozenset({DrawId(0, "1")})),
    DRAWS,
    {DRAWS[4].id: 30},
)


class LoggedRounds(Round):
    """A round that is written down."""

    def __init__(self, arguments: RoundArguments) -> None:
        super().__init__(
            arguments.rules, arguments.plan, arguments.draws, arguments.expected_tokens
        )
        self.log = RoundLog(arguments)

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.log.handled(event, commands)
        return commands


def lines_of(seed: int, faults: int, race: RaceKind = RaceKind.TOKENS) -> list[str]:
    """The log of a round whose events come in the order of a seed."""
    rng = random.Random(seed)
    rules = TailBatchingRules(4, 2, (1.5,), race=race)
    arguments = RoundArguments(rules, ARGUMENTS.plan, DRAWS, ARGUMENTS.expected_tokens)
    lengths: Lengths = {draw.id: [rng.randint(1, 40), rng.randint(1, 40)] for draw in DRAWS}
    round_ = LoggedRounds(arguments)
    engine = Engine(round_, lengths, rng)
    for name in ("a", "b"):
        engine.tell(ReplicaJoined(0.0, name, 6))
    assert engine.run(faults).finish is not None
    return round_.log.lines


def test_the_arguments_come_back_as_they_were() -> None:
    assert read_round(RoundLog(ARGUMENTS).lines).arguments == ARGUMENTS


def test_what_is_known_of_its_rewards_comes_back_and_need_not_be_there() -> None:
    speed = RewardSpeed(RewardSums(3.0, 0.5), RewardSums(4.0, 0.75), {0: 3.0, 12: 1.0})
    rewards = RewardsSeen({DRAWS[0].id: "judge", DRAWS[1].id: "math"}, {"judge": speed})
    log = RoundLog(ARGUMENTS)
    assert read_round(log.lines).rewards == RewardsSeen()
    log.rewarded(rewards)
    assert read_round(log.lines).rewards == rewards
    assert replayed(read_round(log.lines)) == []


@given(st.integers(0, 10_000), st.integers(0, 3), st.sampled_from(RaceKind))
def test_a_replayed_round_gives_the_logged_commands(seed: int, faults: int, race: RaceKind) -> None:
    logged = read_round(lines_of(seed, faults, race))
    assert len(logged.handled) > 10
    assert replayed(logged) == []
    assert logged.handled[-1].commands[-1]["type"] == "FinishRound"


def test_a_restored_group_comes_back() -> None:
    event = GroupRestored(1.5, DRAWS[0].id, (3, 4), 2)
    log = RoundLog(ARGUMENTS)
    log.handled(event, ARGUMENTS.make().handle(event))
    assert read_round(log.lines).handled[0].event == event


def test_draws_that_were_added_come_back() -> None:
    draw = Draw(0, "new", (7, 8), first_step=3)
    event = DrawsAdded(1.5, 2, (draw,), (GroupRestored(1.5, draw.id, (3, 4)),))
    log = RoundLog(ARGUMENTS)
    log.handled(event, ARGUMENTS.make().handle(event))
    assert read_round(log.lines).handled[0].event == event
    assert replayed(read_round(log.lines)) == []


def test_a_log_from_before_replacements_were_bounded_is_read() -> None:
    first = json.loads(RoundLog(ARGUMENTS).lines[0])
    del first["round"]["rules"]["max_replacements"]
    assert read_round([json.dumps(first)]).arguments == ARGUMENTS


def test_an_event_from_before_weights_were_told_is_read() -> None:
    event = ReplicaJoined(0.0, "a", 6)
    values = to_json(event)
    del values["weight_kv_tokens"]
    assert event_from_json(values) == event


def test_a_log_from_before_cuts_were_told_is_played_again() -> None:
    logged = read_round(lines_of(0, 0, RaceKind.TOKENS))
    finish = logged.handled[-1].commands[-1]
    assert finish.pop("cuts")
    assert replayed(logged) == []
    finish["winners"] = finish["winners"][::-1]
    assert len(replayed(logged)) == 1


def test_a_command_that_differs_is_found() -> None:
    lines = lines_of(0, 0)
    wrong = [line.replace('"type":"EmitGroup"', '"type":"AbortGroup"', 1) for line in lines]
    assert wrong != lines
    assert any("EmitGroup" in difference for difference in replayed(read_round(wrong)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [], "the log is empty"),
        (lambda lines: lines[1:], "line 1 "),
        (lambda lines: [lines[0], "{"], "line 2 "),
        (lambda lines: [lines[0], json.dumps({"event": {"type": "Nothing"}})], "line 2 .*Nothing"),
    ],
)
def test_what_is_not_a_log_is_refused(change: object, said: str) -> None:
    lines: Sequence[str] = lines_of(0, 0)
    with pytest.raises(RoundLogError, match=said):
        read_round(change(lines))  # type: ignore[operator]
