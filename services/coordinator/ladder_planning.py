"""Mode `auto` of a live run: what its rounds leave in its memory, and when a ladder is chosen.
Selection weights go by the same memory, in any mode that has them.

The memory and the choice are those of `rollpacker.policy.ladder_memory`, as in the simulator. The
memory is part of the run's state: a round adds to it in the outcome of its step, so a crash, a
rewind or a pause finds it as it was. A choice is made when a step begins, becomes settings in force
there (`changes.with_ladder`) and one event of the run; the step that is repeated has it already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollpacker.policy.engine_memory import EnginesSeen
from rollpacker.policy.ladder_forecast import PlannerRules
from rollpacker.policy.ladder_memory import (
    STEPS_SEEN,
    RoundSeen,
    TrainedGroup,
    is_due,
    memory_from_json,
    memory_to_json,
    next_ladder,
    other_seconds,
    remembered,
    selection_at,
)
from rollpacker.policy.selection_weights import Selection
from rollpacker.settings import RunSettings
from rollpacker.store.records import ChosenLadder, RunState
from rollpacker.store.run_store import RunStore
from services.coordinator.round_result import RoundResult


async def chosen_ladder(
    store: RunStore, state: RunState, settings: RunSettings
) -> ChosenLadder | None:
    """The ladder from this step on, where mode auto is due to choose."""
    if settings.tail_batching.mode != "auto":
        return None
    factors = settings.tail_batching.resolved_speculation_factors
    records = await store.records_before(state.step, STEPS_SEEN)
    if not is_due(state.step, factors, [record.round_kind for record in records]):
        return None
    # What the run was asked for; in force may be what was chosen before.
    asked = state.settings.get("tail_batching", {}).get("selection_weights")
    choice = next_ladder(
        replace(planner_rules(settings), selection_weights=asked),
        memory_from_json(state.ladder_memory),
        state.step,
        [other_seconds(record.metrics) for record in records],
        factors,
        settings.tail_batching.resolved_tensor_parallel_sizes,
        settings.tail_batching.resolved_selection_weights,
    )
    return ChosenLadder(
        state.step, choice.factors, choice.reason, choice.sizes, choice.selection_weights
    )


def planner_rules(settings: RunSettings) -> PlannerRules:
    """What the planner needs to know of a run; the rest it measures."""
    tail = settings.tail_batching
    return PlannerRules(
        tail.prompts_per_step,
        tail.responses_per_prompt,
        settings.sampling.max_response_tokens,
        tail.max_deferral_age,
        smallest_size=tail.tensor_parallel_size,
        largest_size=tail.max_tensor_parallel_size,
    )


def selection_of(state: RunState) -> Selection:
    """What is known of the draws of the open step by the races that they have lost."""
    lost = {item.draw.id: item.lost for item in state.deferred if item.lost is not None}
    return selection_at(memory_from_json(state.ladder_memory), state.step, lost)


def memory_after(state: RunState, result: RoundResult) -> Mapping[str, Any]:
    """The run's memory with the round of its open step; as it was where nothing goes by it."""
    meter = result.meter
    if meter is None:
        return state.ladder_memory
    trained = [
        TrainedGroup(
            group.draw.id,
            group.draw.first_step,
            tuple(len(scored.response.token_ids) for scored in group.responses),
            sum(scored.response.carried_token_count for scored in group.responses),
        )
        for group in result.groups
        if group.responses
    ]
    seen = RoundSeen(
        state.step,
        trained,
        result.finish.deferred,
        EnginesSeen.of(meter, result.tensor_parallel_size, result.apply_seconds),
        meter.moved,
        result.rewards,
    )
    memory = memory_from_json(state.ladder_memory)
    return memory_to_json(remembered(memory, seen))
