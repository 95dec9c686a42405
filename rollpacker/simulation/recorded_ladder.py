"""The planner of a real run in mode `auto`, played again from the run's files.

The logs of the rounds hold all that the run remembered (`rollpacker.policy.ladder_memory`): which
groups were trained and deferred, when each response ended, and what the graders took. metrics.jsonl
adds what the steps took beside their rollout. So the same choices must come out, to the
last bit: of a run of this version, a difference is a bug of the live coordinator or of the replay.
A ladder that people changed by hand counts as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollpacker.policy.ladder_forecast import PlannerRules
from rollpacker.policy.ladder_memory import (
    STEPS_SEEN,
    LadderMemory,
    is_due,
    next_ladder,
    other_seconds,
    remembered,
)
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.round_log import LoggedRound, RoundArguments
from rollpacker.simulation.recorded_steps import RecordedStep, run_values, step_metrics
from rollpacker.types import DrawId


def ladder_rows(directory: Path, steps: Sequence[RecordedStep]) -> Iterator[dict[str, Any]]:
    """Each choice of the run, and whether the run did the same; nothing for the other modes."""
    run = run_values(directory)
    if run.get("mode") != "auto" or not steps:
        return
    metrics = step_metrics(directory)
    memory, before = LadderMemory(), steps[0].logged.arguments.rules
    newest: deque[LoggedRound] = deque(maxlen=STEPS_SEEN)
    queue: set[DrawId] = set()
    waiting: TailBatchingRules | None = None  # without a level: from the end of the queue on
    choices = differences = 0
    for recorded in steps:
        logged, seen = recorded.logged, recorded.seen
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
