"""The finished steps of a real run, from its files: what it remembered of each round, and how the
round ended.

    rounds/ --a new Round is told the logged events--> RecordedStep --> ladders, weights, drift
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.policy.commands import EmitGroup, FinishRound
from rollpacker.policy.engine_memory import EnginesSeen
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.events import DrawsAdded, GroupRestored, ResponseFinished
from rollpacker.policy.ladder_memory import RoundSeen, TrainedGroup
from rollpacker.round_log import LoggedRound
from rollpacker.types import DrawId


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A round and what came of it."""

    logged: LoggedRound
    seen: RoundSeen  # as the run remembered it
    finish: FinishRound


def recorded_steps(directory: Path, rounds: Sequence[LoggedRound]) -> list[RecordedStep]:
    """The steps that are over: the log of a round is there before its step's other files."""
    metrics = step_metrics(directory)
    return [
        recorded_step(logged, metrics[logged.arguments.plan.step])
        for logged in rounds
        if logged.arguments.plan.step in metrics
    ]


def recorded_step(logged: LoggedRound, metrics: Mapping[str, float]) -> RecordedStep:
    """Tell a new round what it was told; `metrics` are its step's."""
    arguments = logged.arguments
    round_ = arguments.make()
    meter = EngineMeter(arguments.prompt_tokens)
    first_steps = {draw.id: draw.first_step for draw in arguments.draws}
    tokens: dict[DrawId, dict[int, int]] = {}
    carried: dict[DrawId, int] = {}
    emitted: list[DrawId] = []
    finish: FinishRound | None = None
    for handled in logged.handled:
        event = handled.event
        commands = round_.handle(event)
        meter.handled(event, commands)
        restored: tuple[GroupRestored, ...] = ()
        match event:
            case ResponseFinished(_, draw, index, count, carried_tokens):
                tokens.setdefault(draw, {})[index] = count
                carried[draw] = carried.get(draw, 0) + carried_tokens
            case GroupRestored():
                restored = (event,)
            case DrawsAdded():
                first_steps |= {draw.id: draw.first_step for draw in event.draws}
                restored = event.restored
        for group in restored:
            tokens[group.draw] = dict(enumerate(group.response_tokens))
            carried[group.draw] = group.carried_tokens
            emitted.append(group.draw)
        for command in commands:
            if isinstance(command, EmitGroup):
                emitted.append(command.draw)
            elif isinstance(command, FinishRound):
                finish = command
    assert finish is not None, "a log is written when its round is over"
    trained = [
        TrainedGroup(
            draw,
            first_steps[draw],
            tuple(tokens[draw][index] for index in sorted(tokens[draw])),
            carried[draw],
        )
        for draw in emitted
    ]
    size = arguments.rules.tensor_parallel_size(arguments.plan.level)
    seen = RoundSeen(
        arguments.plan.step,
        trained,
        finish.deferred,
        EnginesSeen.of(meter, size, metrics.get("timing_s/apply_weights", 0.0)),
        meter.moved,
        logged.rewards,
    )
    return RecordedStep(logged, seen, finish)


def run_values(directory: Path) -> dict[str, Any]:
    """What run.json says; nothing where there is none."""
    path = directory / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def step_metrics(directory: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics.jsonl, by step; none where there is no such file."""
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row for row in rows}
