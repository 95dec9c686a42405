"""The planner of a real run in mode `auto`, played again from the run's files.

The logs of the rounds hold all that the run remembered (`rollpacker.policy.ladder_memory`): which
groups were trained and deferred, and when each response ended. metrics.jsonl adds what the steps
took beside their rollout. So the same choices must come out, to the last bit: a difference is a bug
of the live coordinator or of the replay. A ladder that people changed by hand counts as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollpacker.policy.commands import EmitGroup, FinishRound
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
    remembered,
)
from rollpacker.round_log import LoggedRound
from rollpacker.types import DrawId


def ladder_rows(directory: Path, rounds: Sequence[LoggedRound]) -> Iterator[dict[str, Any]]:
    """Each choice of the run, and whether the run did the same; nothing for the other modes."""
    run_file = directory / "run.json"
    run = json.loads(run_file.read_text()) if run_file.exists() else {}
    if run.get("mode") != "auto":
        return
    cap = run["settings"]["sampling"]["max_response_tokens"]
    other_seconds = _other_seconds(directory / "metrics.jsonl")
    memory, before = LadderMemory(), rounds[0].arguments.rules.speculation_factors
    choices = differences = 0
    for logged in rounds:
        arguments = logged.arguments
        rules, step = arguments.rules, arguments.plan.step
        if is_due(step):
            planner = PlannerRules(
                rules.prompts_per_step, rules.responses_per_prompt, cap, rules.max_deferral_age
            )
            others = [other_seconds[s] for s in range(step - STEPS_SEEN, step) if s >= 0]
            choice = next_ladder(planner, memory, step, others, before)
            # A ladder without a level waits for the end of the queue.
            expected = [choice.factors] if choice.factors else [(), before]
            same = rules.speculation_factors in expected
            choices, differences = choices + 1, differences + (not same)
            yield {
                "figure": "ladder",
                "step": step,
                "factors": list(choice.factors),
                "reason": choice.reason,
                "same": same,
            }
        before = rules.speculation_factors
        memory = remembered(memory, round_seen(logged))
    yield {"figure": "ladders", "choices": choices, "differences": differences}


def round_seen(logged: LoggedRound) -> RoundSeen:
    """What the run remembered of a round."""
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
    return RoundSeen(
        arguments.plan.step,
        trained,
        finish.deferred,
        meter.sums,
        meter.replicas,
        meter.kv_capacity,
        meter.prompt_tokens,
        meter.moved,
    )


def _other_seconds(path: Path) -> dict[int, float]:
    """By step: what it took beside its rollout."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["timing_s/step"] - row["timing_s/rollout"] for row in rows}
