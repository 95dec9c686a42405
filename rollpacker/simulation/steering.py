"""Mode `auto` in the simulator: what its rounds leave is remembered as a live run remembers it.

The memory and the choice are those of `rollpacker.policy.ladder_memory`; here is only what a
`StepTrace` has to say of a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rollpacker.policy.engine_memory import EnginesSeen
from rollpacker.policy.engine_meter import EngineMeter
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
from rollpacker.policy.parallelism import ParallelismRules, ParallelismState, after_round
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.simulation.simulator import StepTrace
from rollpacker.types import RoundKind


class PlannedSteering:
    """Call it before each step; `reasons` has a line per decision, for the event log."""

    def __init__(self, rules: PlannerRules) -> None:
        self._rules = rules
        self.memory = LadderMemory()
        self.reasons: list[str] = []

    def __call__(
        self, step: int, done: Sequence[StepTrace], present: TailBatchingRules
    ) -> TailBatchingRules | None:
        """The rules from this step on; None: nothing is decided."""
        if done:
            self.memory = remembered(self.memory, round_seen(done[-1]))
        newest = done[: -STEPS_SEEN - 1 : -1]
        if not is_due(step, present.speculation_factors, [s.kind for s in newest]):
            return None
        others = [s.step_seconds - s.scored_seconds for s in newest]
        choice = next_ladder(
            self._rules,
            self.memory,
            step,
            others,
            present.speculation_factors,
            present.tensor_parallel_sizes,
            present.selection_weights,
        )
        self.reasons.append(f"step {step}: {choice.reason}")
        return dataclasses.replace(
            present,
            speculation_factors=choice.factors,
            tensor_parallel_sizes=choice.sizes,
            selection_weights=choice.selection_weights,
        )


class PreemptionSteering:
    """The paper's planner (section 4.2): a size for short rounds and one for long ones."""

    def __init__(self, smallest: int, largest: int) -> None:
        self._rules = ParallelismRules(smallest, largest)
        self._states = dict.fromkeys((RoundKind.SHORT, RoundKind.LONG), ParallelismState(smallest))

    def __call__(
        self, _step: int, done: Sequence[StepTrace], present: TailBatchingRules
    ) -> TailBatchingRules | None:
        """The rules with the sizes for this step."""
        if done and done[-1].kind in self._states:
            kind = done[-1].kind
            self._states[kind] = after_round(self._rules, self._states[kind], done[-1].preemptions)
        sizes = tuple(state.size for state in self._states.values())
        return dataclasses.replace(present, tensor_parallel_sizes=sizes)


def round_seen(step: StepTrace) -> RoundSeen:
    """What a run remembers of a simulated round."""
    trace = step.round
    assert trace.finish is not None
    meter = trace.meter or EngineMeter(0.0)  # without one nothing is known of engines
    engines = EnginesSeen.of(meter, step.tensor_parallel_size, step.refit_seconds)
    return RoundSeen(
        step.step,
        [
            TrainedGroup(draw, step.step - age, lengths, trace.carried_tokens.get(draw, 0))
            for (draw, lengths), age in zip(trace.emitted, step.ages, strict=True)
        ],
        trace.finish.deferred,
        dataclasses.replace(
            engines, kv_capacity=step.kv_capacity, weight_kv_tokens=step.weight_kv_tokens
        ),
        meter.moved,
        trace.rewards,
    )


def planner_rules(
    rules: TailBatchingRules, cap: int, smallest_size: int = 1, largest_size: int = 0
) -> PlannerRules:
    """What the planner needs to know of a scenario; the rest it measures.

    `largest_size`: tensor-parallel size up to which it may choose; 0: it does not.
    """
    return PlannerRules(
        rules.prompts_per_step,
        rules.responses_per_prompt,
        cap,
        rules.max_deferral_age,
        smallest_size=smallest_size,
        largest_size=largest_size,
        selection_weights=None,
    )
