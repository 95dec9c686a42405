"""A real run beside its simulation: the logs of its rounds, its engine's speed, its round times.

The logs (`RUN_DIR/rounds`, see `rollpacker.round_log`) say when each response was launched and when
it ended, so how many ran on a replica at any time. All responses of a replica advance by one token
per decode step, and a step with n of them takes base + n * per_sequence seconds: that is fitted to
every second round, and the others are simulated from it, with the lengths that the run had. The
error of their times is what a claim of the simulator is worth on that machine.

Prefill, rewards and the trainer that shares the machine are in the fitted speed; a response that
was cut off has the length that it came to later, or what it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.events import ProgressReported, ReplicaJoined, ResponseFinished
from rollpacker.round_log import LoggedRound, RoundLogError, read_round, replayed
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.engine_speed import EngineSpeed
from rollpacker.simulation.recorded_ladder import ladder_rows
from rollpacker.simulation.recorded_steps import recorded_steps
from rollpacker.simulation.recorded_weights import drift_rows, weight_rows
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable
from rollpacker.types import DrawId

Floats = NDArray[np.float64]
_UNBOUNDED_KV = 1 << 40  # tokens: small models on a host
_RATIOS = np.geomspace(1e-4, 10.0, 61)  # of per_sequence to base


@dataclass(frozen=True, slots=True)
class Span:
    """A response on a replica, from its launch to its end; seconds on the coordinator's clock."""

    replica_id: str
    start: float
    end: float
    decoded_tokens: int | None  # None: cut off


@dataclass(slots=True)
class RecordedRound:
    """What a log says about the responses of a round."""

    logged: LoggedRound
    spans: list[Span] = field(default_factory=list)
    tokens: dict[tuple[DrawId, int], int] = field(default_factory=dict)  # of finished responses
    carried: dict[tuple[DrawId, int], int] = field(default_factory=dict)
    progress: dict[DrawId, int] = field(default_factory=dict)  # longest response seen
    capacities: dict[str, int] = field(default_factory=dict)  # responses at a time, by replica
    rollout_seconds: float = 0.0
    winners: tuple[DrawId, ...] = ()  # in order


def recorded_rounds(directory: Path) -> list[RecordedRound]:
    """The rounds of a run, in order. Raises RoundLogError when there are none."""
    paths = sorted((directory / "rounds").glob("step_*.jsonl"))
    if not paths:
        raise RoundLogError(f"{directory}: no rounds/step_*.jsonl; is it a run directory?")
    return [recorded(read_round(path.read_text().splitlines())) for path in paths]


def recorded(logged: LoggedRound) -> RecordedRound:
    """Follow each response of a round from its launch to its end."""
    found = RecordedRound(logged)
    running: dict[tuple[Any, ...], tuple[str, float]] = {}
    for handled in logged.handled:
        event = handled.event
        if isinstance(event, ReplicaJoined):
            found.capacities[event.replica_id] = event.response_capacity
        elif isinstance(event, ProgressReported):
            seen = found.progress.get(event.draw, 0)
            found.progress[event.draw] = max(seen, event.longest_tokens)
        elif isinstance(event, ResponseFinished):
            key = (event.draw, event.index)
            found.tokens[key], found.carried[key] = event.tokens, event.carried_tokens
            if begun := running.pop((*event.draw, event.index), None):
                found.spans.append(Span(*begun, event.at, event.tokens - event.carried_tokens))
        for command in handled.commands:
            _follow(found, running, command, event.at)
    return found


def _follow(
    found: RecordedRound,
    running: dict[tuple[Any, ...], tuple[str, float]],
    command: dict[str, Any],
    at: float,
) -> None:
    kind = command["type"]
    if kind == "LaunchGroup":
        for index in command["indices"]:
            running[*command["draw"], index] = (command["replica_id"], at)
    elif kind == "AbortGroup":
        for key in [key for key in running if list(key[:2]) == command["draw"]]:
            found.spans.append(Span(*running.pop(key), at, None))
    elif kind == "FinishRound":
        found.rollout_seconds = command["rollout_seconds"]
        found.winners = tuple(DrawId(*draw) for draw in command["winners"])


def measured_speed(rounds: Sequence[RecordedRound]) -> EngineSpeed:
    """Seconds of a decode step, fitted to the finished responses of these rounds.

    A response of T tokens lives for as long as the integral of dt / (base + n(t) * per_sequence)
    needs to reach T: linear in 1 / base once the ratio of the two is given, which is searched.
    """
    tokens = np.array(
        [s.decoded_tokens for r in rounds for s in r.spans if s.decoded_tokens is not None],
        dtype=float,
    )
    best, found = np.inf, (0.0, 0.0)
    for ratio in _RATIOS:
        seconds = np.concatenate([_weighted_seconds(r.spans, float(ratio)) for r in rounds])
        rate = float(seconds @ tokens / (seconds @ seconds))  # 1 / base
        error = float(np.sum((tokens - rate * seconds) ** 2))
        if error < best:
            best, found = error, (1.0 / rate, float(ratio) / rate)
    base, per_sequence = found
    return EngineSpeed(base, per_sequence, 0.0, 0.0, _UNBOUNDED_KV)


def _weighted_seconds(spans: Sequence[Span], ratio: float) -> Floats:
    """Of each finished response: its seconds, each worth 1 / (1 + ratio * running responses)."""
    parts: dict[str, tuple[Floats, Floats]] = {}
    for name in {span.replica_id for span in spans}:
        own = [span for span in spans if span.replica_id == name]
        times = np.array([s.start for s in own] + [s.end for s in own])
        changes = np.array([1.0] * len(own) + [-1.0] * len(own))
        order = np.argsort(times, kind="stable")
        times, running = times[order], np.cumsum(changes[order])
        steps = np.diff(times) / (1.0 + ratio * np.maximum(running[:-1], 1.0))
        parts[name] = (times, np.concatenate([[0.0], np.cumsum(steps)]))
    return np.array(
        [
            np.interp(s.end, *parts[s.replica_id]) - np.interp(s.start, *parts[s.replica_id])
            for s in spans
            if s.decoded_tokens is not None
        ]
    )


class NoTrainer:
    """The trainer is not timed here."""

    def receive(self, at: float, tokens: int) -> None:
        """A group has arrived."""

    def release(self, at: float, share: float) -> None:
        """GPUs are released."""


def simulated(
    round_: RecordedRound, later: dict[tuple[DrawId, int], int], speed: EngineSpeed
) -> FinishRound:
    """The end of the same round at this speed; `later`: where cut off responses ended."""
    arguments = round_.logged.arguments
    launchables = {
        draw.id: _launchable(round_, later, draw.id, arguments.plan.response_count)
        for draw in arguments.draws
    }
    replicas = [ReplicaModel(name, speed) for name in sorted(round_.capacities)]
    trace = RoundSimulation(
        arguments.make(),
        arguments.rules,
        arguments.plan,
        arguments.draws,
        launchables,
        replicas,
        None,
        NoTrainer(),
        0.0,
        max(round_.capacities.values()),
    ).run()
    assert trace.finish is not None
    return trace.finish


def _launchable(
    round_: RecordedRound, later: dict[tuple[DrawId, int], int], draw: DrawId, count: int
) -> Launchable:
    beyond = round_.progress.get(draw, 0) + 1
    keys = [(draw, index) for index in range(count)]
    lengths = [round_.tokens.get(key) or max(beyond, later.get(key, 0)) for key in keys]
    carried = [
        min(round_.carried.get(key, 0), length - 1)
        for key, length in zip(keys, lengths, strict=True)
    ]
    return Launchable(lengths, carried)


def replay_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Whether the policy repeats the run's commands, and how well its round times are foretold."""
    rounds = recorded_rounds(directory)
    differences = [line for round_ in rounds for line in replayed(round_.logged)]
    yield {
        "figure": "replay",
        "rounds": len(rounds),
        "events": sum(len(r.logged.handled) for r in rounds),
        "commands": sum(len(h.commands) for r in rounds for h in r.logged.handled),
        "differences": len(differences),
        "first_difference": differences[0] if differences else None,
    }
    later: dict[tuple[DrawId, int], int] = {}
    for round_ in rounds:
        later |= round_.tokens
    speed = measured_speed(rounds[::2])
    yield {
        "figure": "engine_speed",
        "base_seconds": speed.base_seconds,
        "per_sequence_seconds": speed.per_sequence_seconds,
    }
    ran = [round_ for round_ in rounds[1::2] if round_.capacities]  # else a crash left it no work
    yield from _prediction_rows(ran, later, speed)
    steps = recorded_steps(directory, [round_.logged for round_ in rounds])
    yield from drift_rows(directory, steps)
    yield from weight_rows(directory, steps)
    yield from ladder_rows(directory, steps)


def _prediction_rows(
    rounds: Sequence[RecordedRound], later: dict[tuple[DrawId, int], int], speed: EngineSpeed
) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for round_ in rounds:
        plan, measured = round_.logged.arguments.plan, round_.rollout_seconds
        finish = simulated(round_, later, speed)
        predicted = finish.rollout_seconds
        rows.append(
            {
                "figure": "rollout_seconds",
                "step": plan.step,
                "kind": plan.kind.value,
                "level": plan.level,
                "measured": round(measured, 3),
                "predicted": round(predicted, 3),
                "relative_error": round(predicted / measured - 1.0, 3),
                "same_winners": finish.winners == round_.winners,
            }
        )
    yield from rows
    if rows:
        measured, predicted = (sum(row[name] for row in rows) for name in ("measured", "predicted"))
        yield {
            "figure": "prediction",
            "rounds": len(rows),
            "same_winners": sum(row["same_winners"] for row in rows),
            "median_absolute_error": median(abs(row["relative_error"]) for row in rows),
            "error_of_the_sum": round(predicted / measured - 1.0, 3),
        }
