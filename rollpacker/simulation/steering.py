"""Mode `auto` in the simulator: what its rounds leave is remembered as a live run remembers it.

The memory and the choice are those of `rollpacker.policy.ladder_memory`; here is only what a
`StepTrace` has to say of a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.simulation.simulator import StepTrace


class PlannedSteering:
    """Call it before each step; `reasons` has a line per decision, for the event log."""

    def __init__(self, rules: PlannerRules, kv_capacity: int) -> None:
        """`kv_capacity`: tokens per replica."""
        self._rules = rules
        self._kv_capacity = kv_capacity
        self.memory = LadderMemory()
        self.reasons: list[str] = []

    def __call__(
        self, step: int, done: Sequence[StepTrace], present: TailBatchingRules
    ) -> TailBatchingRules | None:
        """The rules from this step on; None: nothing is decided."""
        if done:
            seen = round_seen(done[-1], self._kv_capacity)
            self.memory = remembered(self.memory, seen)
        if not is_due(step):
            return None
        others = [s.step_seconds - s.rollout_seconds for s in done[-STEPS_SEEN:]]
        factors = present.speculation_factors
        choice = next_ladder(self._rules, self.memory, step, others, factors)
        self.reasons.append(f"step {step}: {choice.reason}")
        return dataclasses.replace(present, speculation_factors=choice.factors)


def round_seen(step: StepTrace, kv_capacity: int) -> RoundSeen:
    """What a run remembers of a simulated round."""
    trace = step.round
    assert trace.finish is not None
    assert trace.meter is not None
    return RoundSeen(
        step.step,
        [
            TrainedGroup(draw, step.step - age, lengths, trace.carried_tokens.get(draw, 0))
            for (draw, lengths), age in zip(trace.emitted, step.ages, strict=True)
        ],
        trace.finish.deferred,
        trace.meter.sums,
        trace.meter.replicas,
        kv_capacity,
        trace.meter.prompt_tokens,
        trace.meter.moved,
    )


def planner_rules(rules: TailBatchingRules, cap: int) -> PlannerRules:
    """What the planner needs to know of a scenario; the rest it measures."""
    return PlannerRules(
        rules.prompts_per_step, rules.responses_per_prompt, cap, rules.max_deferral_age
    )
