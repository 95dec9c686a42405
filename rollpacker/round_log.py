"""A round as JSON lines: what it was given, every event that it was told, every command it gave.

    {"round": {...}}                      the arguments of `Round`, once, first
    {"event": {...}, "commands": [...]}   one line per event, in the order in which it was handled
    {"rewards": {...}}                    what the graders took, last: for the planner

The round has no input but its arguments and events, so a log can be played again anywhere:
`replayed` feeds the events to a new `Round` and gives back where its commands differ (nowhere,
unless the policy has changed). Events that asked for nothing are logged too. Nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import NoneType
from typing import Any, get_args

from rollpacker.algorithms import Estimator
from rollpacker.policy.advantages import AdvantageRules, OverlongShaping
from rollpacker.policy.commands import Command
from rollpacker.policy.events import DrawsAdded, Event, GroupRestored
from rollpacker.policy.reward_meter import RewardSpeed, RewardsSeen, RewardSums
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, Routing, TailBatchingRules
from rollpacker.types import Draw, DrawId, RoundKind

_EVENTS = {kind.__name__: kind for kind in get_args(Event)}


class RoundLogError(ValueError):
    """A line is not of a round log; the message says which and why."""


@dataclass(frozen=True, slots=True)
class RoundArguments:
    """What a `Round` is made of."""

    rules: TailBatchingRules
    plan: RoundPlan
    draws: tuple[Draw, ...]  # in the order of the race
    expected_tokens: Mapping[DrawId, int]
    # For the planner, not for the round:
    prompt_tokens: float = 0.0  # of a prompt, on average
    max_response_tokens: int = 0  # the cap; 0: not known, an older version's log

    def make(self) -> Round:
        """A new round."""
        return Round(self.rules, self.plan, self.draws, self.expected_tokens)


@dataclass(frozen=True, slots=True)
class Handled:
    """One event, and the commands that the round answered it with, as JSON values."""

    event: Event
    commands: list[Any]


class RoundLog:
    """Writes the log of one round, line by line, into memory."""

    def __init__(self, arguments: RoundArguments) -> None:
        self.lines = [_encode({"round": _arguments_to_json(arguments)})]

    def handled(self, event: Event, commands: Sequence[Command]) -> None:
        """The round was told this, and asked for that."""
        given = [to_json(command) for command in commands]
        self.lines.append(_encode({"event": to_json(event), "commands": given}))

    def rewarded(self, rewards: RewardsSeen) -> None:
        """The round is over; this is known of its rewards."""
        values = {
            "kinds": [[*draw, kind] for draw, kind in rewards.kinds.items()],
            "speeds": {
                kind: {
                    "waited": _fields(speed.waited),
                    "busy": _fields(speed.busy),
                    "took": list(speed.took.items()),
                }
                for kind, speed in rewards.speeds.items()
            },
        }
        self.lines.append(_encode({"rewards": values}))


@dataclass(frozen=True, slots=True)
class LoggedRound:
    """A log that was read."""

    arguments: RoundArguments
    handled: list[Handled] = field(default_factory=list)
    rewards: RewardsSeen = field(default_factory=RewardsSeen)  # empty: an older version's log


def read_round(lines: Iterable[str]) -> LoggedRound:
    """Read a log. Raises RoundLogError naming the line."""
    logged: LoggedRound | None = None
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if logged is None:
                logged = LoggedRound(_arguments_from_json(values["round"]))
            elif "rewards" in values:
                logged = dataclasses.replace(logged, rewards=_rewards(values["rewards"]))
            else:
                handled = Handled(event_from_json(values["event"]), values["commands"])
                logged.handled.append(handled)
        except (ValueError, KeyError, TypeError) as error:
            raise RoundLogError(f"line {number} is not of a round log: {error!r}") from error
    if logged is None:
        raise RoundLogError("the log is empty")
    return logged


def replayed(logged: LoggedRound) -> list[str]:
    """Tell a new round the logged events; where its commands differ, one line each."""
    round_ = logged.arguments.make()
    differences = []
    for number, handled in enumerate(logged.handled, start=1):
        ours = [json.loads(_encode(to_json(command))) for command in round_.handle(handled.event)]
        if [_as_logged(*pair) for pair in zip_longest(ours, handled.commands)] != handled.commands:
            name = type(handled.event).__name__
            differences.append(f"event {number} ({name}): {ours}, logged {handled.commands}")
    return differences


def _as_logged(ours: Mapping[str, Any] | None, logged: Mapping[str, Any] | None) -> Any:
    """A command without what an older version did not log."""
    if ours is None or logged is None:
        return ours
    return {name: value for name, value in ours.items() if name in logged}


def to_json(item: Event | Command) -> dict[str, Any]:
    """An event or a command as JSON values; `type` names its class."""
    return {"type": type(item).__name__} | _fields(item)


def event_from_json(values: Mapping[str, Any]) -> Event:
    """The inverse of `to_json` for events. Raises KeyError, TypeError, ValueError."""
    given = dict(values)
    kind = _EVENTS[given.pop("type")]
    if kind is DrawsAdded:
        return DrawsAdded(
            given["at"], given["requested"], _draws(given["draws"]), _restored(given["restored"])
        )
    if "draw" in given:
        given["draw"] = DrawId(*given["draw"])
    event: Event = kind(**{name: _tuple(value) for name, value in given.items()})
    return event


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_SCALARS = (int, float, str, NoneType)  # bool is an int


_field_names: dict[type, tuple[str, ...]] = {}  # by dataclass, filled as they come


def _fields(item: Any) -> dict[str, Any]:
    kind = type(item)
    if kind not in _field_names:
        _field_names[kind] = tuple(f.name for f in dataclasses.fields(item))
    return {name: _plain(getattr(item, name)) for name in _field_names[kind]}


def _plain(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    return _fields(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _arguments_to_json(arguments: RoundArguments) -> dict[str, Any]:
    expected = [[*draw, tokens] for draw, tokens in arguments.expected_tokens.items()]
    return {
        "rules": _fields(arguments.rules),
        "plan": _fields(arguments.plan),
        "draws": _plain(arguments.draws),
        "expected_tokens": expected,
        "prompt_tokens": arguments.prompt_tokens,
        "max_response_tokens": arguments.max_response_tokens,
    }


def _arguments_from_json(values: Mapping[str, Any]) -> RoundArguments:
    rules, plan = values["rules"], values["plan"]
    return RoundArguments(
        _made(TailBatchingRules, rules, race=RaceKind, routing=Routing, advantages=_advantages),
        _made(RoundPlan, plan, kind=RoundKind, queued=_draws, protected=_draw_ids),
        _draws(values["draws"]),
        {DrawId(epoch, prompt): tokens for epoch, prompt, tokens in values["expected_tokens"]},
        values.get("prompt_tokens", 0.0),
        values.get("max_response_tokens", 0),
    )


def _made(
    make: Callable[..., Any], values: Mapping[str, Any], /, **parts: Callable[[Any], Any]
) -> Any:
    """An instance from its fields; `parts` says how to make those that JSON cannot hold."""
    return make(**{name: parts.get(name, _tuple)(value) for name, value in values.items()})


def _advantages(values: Mapping[str, Any]) -> Any:
    def shaping(part: Mapping[str, Any] | None) -> OverlongShaping | None:
        return None if part is None else OverlongShaping(**part)

    return _made(AdvantageRules, values, estimator=Estimator, overlong=shaping)


def _draws(rows: Iterable[Mapping[str, Any]]) -> tuple[Draw, ...]:
    return tuple(_made(Draw, row) for row in rows)


def _rewards(values: Mapping[str, Any]) -> RewardsSeen:
    def sums(part: Mapping[str, float]) -> RewardSums:
        return RewardSums(**part)

    return RewardsSeen(
        {DrawId(epoch, prompt): kind for epoch, prompt, kind in values["kinds"]},
        {
            kind: _made(RewardSpeed, speed, waited=sums, busy=sums, took=dict)
            for kind, speed in values["speeds"].items()
        },
    )


def _restored(rows: Iterable[Mapping[str, Any]]) -> tuple[GroupRestored, ...]:
    return tuple(_made(GroupRestored, row, draw=lambda draw: DrawId(*draw)) for row in rows)


def _draw_ids(rows: Iterable[Sequence[Any]]) -> frozenset[DrawId]:
    return frozenset(DrawId(*row) for row in rows)
