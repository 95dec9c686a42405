"""The planner of a real run in mode `auto`, played again from the run's files.

The logs of the rounds hold all that the run remembered (`rollpacker.policy.ladder_memory`): which
groups were trained and deferred, when each response ended, and what the graders took. metrics.jsonl
adds what the steps took beside their rollout. So the same choices must come out, to the
last bit: of a run of this version, a difference is a bug of the live coordinator or of the replay.
A ladder that people changed by hand counts as one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollpacker.policy.commands import EmitGroup, FinishRound
from rollpacker.policy.engine_memory import EnginesSeen
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.events import DrawsAdded, GroupRestored, ResponseFinished
from rollpacker.policy.ladder_forecast import PlannerRules
from rollpacker.policy.ladder_memory import (
    STEPS_SEEN,
    LadderMemory,
    RoundSeen,
    TrainedGroup,
    is_due,
    next_ladder,
    other_seconds,
    remembered,
)
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.round_log import LoggedRound, RoundArguments
from rollpacker.types import DrawId


def ladder_rows(directory: Path, rounds: Sequence[LoggedRound]) -> Iterator[dict[str, Any]]:
    """Each choice of the run, and whether the run did the same; nothing for the other modes."""
    run = run_values(directory)
    if run.get("mode") != "auto" or not rounds:
        return
    metrics = step_metrics(directory)
    memory, before = LadderMemory(), rounds[0].arguments.rules
    newest: deque[LoggedRound] = deque(maxlen=STEPS_SEEN)
    queue: set[DrawId] = set()
    waiting: TailBatchingRules | None = None  # without a level: from the end of the queue on
    choices = differences = 0
    for logged in rounds:
        arguments = logged.arguments
        rules, step = arguments.rules, arguments.plan.step
        if waiting is not None and not queue:
            before, waiting = waiting, None
        kinds = [round_.arguments.plan.kind for round_ in newest]
        if is_due(step, before.speculation_factors, kinds):
            planner = _planner_rules(arguments, run["settings"])
            others = [other_seconds(metrics[s]) for s in range(max(0, step - STEPS_SEEN), step)]
            choice = next_ladder(
                planner,
                memory,
                step,
                others,
                before.speculation_factors,
                before.tensor_parallel_sizes,
                before.selection_weights,
            )
            chosen = replace(
                before,
                speculation_factors=choice.factors,
                tensor_parallel_sizes=choice.sizes,
                selection_weights=choice.selection_weights,
            )
            waiting = chosen if queue and not choice.factors else None
            expected = before if waiting else chosen
            same = _ladder(rules) == _ladder(expected)
            choices, differences = choices + 1, differences + (not same)
            yield {
                "figure": "ladder",
                "step": step,
                "factors": list(choice.factors),
                "sizes": list(choice.sizes),
                "selection_weights": choice.selection_weights,
                "reason": choice.reason,
                "same": same,
            }
        before = rules
        newest.appendleft(logged)
        seen, _ = played(logged, metrics[step])
        queue -= {draw.id for draw in arguments.plan.queued}
        queue |= {item.draw.id for item in seen.deferred}
        memory = remembered(memory, seen)
    yield {"figure": "ladders", "choices": choices, "differences": differences}


def _ladder(rules: TailBatchingRules) -> tuple[tuple[float, ...], tuple[int, ...], bool]:
    return rules.speculation_factors, rules.tensor_parallel_sizes, rules.selection_weights


def _planner_rules(arguments: RoundArguments, settings: Mapping[str, Any]) -> PlannerRules:
    """As they were for a round; `settings`: those that the run began with."""
    rules, tail = arguments.rules, settings["tail_batching"]
    return PlannerRules(
        rules.prompts_per_step,
        rules.responses_per_prompt,
        arguments.max_response_tokens or settings["sampling"]["max_response_tokens"],
        rules.max_deferral_age,
        smallest_size=tail.get("tensor_parallel_size", 1),
        largest_size=tail.get("max_tensor_parallel_size", 0),
        selection_weights=tail.get("selection_weights"),
    )


def played(logged: LoggedRound, metrics: Mapping[str, float]) -> tuple[RoundSeen, FinishRound]:
    """What the run remembered of a round, and how it ended; `metrics` are its step's."""
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
    return seen, finish


def finished(directory: Path, rounds: Sequence[LoggedRound]) -> list[LoggedRound]:
    """Those of steps that are over: the log of a round is there before its step's other files."""
    steps = step_metrics(directory)
    return [logged for logged in rounds if logged.arguments.plan.step in steps]


def run_values(directory: Path) -> dict[str, Any]:
    """What run.json says; nothing where there is none."""
    path = directory / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def step_metrics(directory: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics.jsonl, by step; none where there is no such file."""
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row for row in rows}
