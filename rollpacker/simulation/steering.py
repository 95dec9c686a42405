"""Mode `auto`: the planner between the steps of a simulated run.

It sees what the live coordinator sees: the lengths of the groups that were trained, how far the
deferred ones were, and the engine's measured speed. Every few steps it may change the ladder.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rollpacker.policy.group_law import ObservedGroup
from rollpacker.policy.planner import EngineMeasure, PlannerRules, choose_ladder
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.simulation.engine_speed import EngineSpeed
from rollpacker.simulation.scenario import Drift
from rollpacker.simulation.simulator import StepTrace
from rollpacker.types import DrawId

_GROUPS_SEEN = 700  # a sample of them, evenly over the draws
_HISTORY_STEPS = 48  # since the first launch
_HALF_LIFE_STEPS = 16.0


@dataclass(slots=True)
class _Seen:
    first_step: int
    group: ObservedGroup
    longest: int  # at which it was cut off


class PlannedSteering:
    """Call it before each step; `reasons` has a line per decision, for the event log."""

    def __init__(
        self,
        rules: PlannerRules,
        speed: EngineSpeed,
        replicas: int,
        prompt_tokens: int,
        every: int = 4,
    ) -> None:
        self._rules = rules
        self._speed = speed
        self._replicas = replicas
        self._prompt_tokens = prompt_tokens
        self._every = every
        self._seen: dict[DrawId, _Seen] = {}
        self.reasons: list[str] = []

    def __call__(
        self, step: int, done: list[StepTrace], present: TailBatchingRules
    ) -> TailBatchingRules:
        """The rules of this step."""
        if done:
            self._observe(done[-1])
        if step < 2 or step % self._every:
            return present
        groups = self._sample(step)
        engine = self._engine(done)
        choice = choose_ladder(self._rules, engine, groups, present.speculation_factors)
        self.reasons.append(f"step {step}: {choice.reason}")
        return dataclasses.replace(present, speculation_factors=choice.factors)

    def _sample(self, step: int) -> list[ObservedGroup]:
        """Draws by their first launch, whatever became of them: only that is unbiased."""
        recent = [item for item in self._seen.values() if step - item.first_step < _HISTORY_STEPS]
        every = max(1, len(recent) // _GROUPS_SEEN)
        return [
            dataclasses.replace(
                item.group, weight=0.5 ** ((step - item.first_step) / _HALF_LIFE_STEPS)
            )
            for item in recent[::every]
        ]

    def _observe(self, step: StepTrace) -> None:
        assert step.round.finish is not None
        for draw, lengths in step.round.emitted:
            self._remember(draw, ObservedGroup(lengths, complete=True), step.step)
        for item in step.round.finish.deferred:
            tokens = tuple(max(1, count) for count in item.response_tokens)
            self._remember(item.draw.id, ObservedGroup(tokens, complete=False), step.step)

    def _remember(self, draw: DrawId, group: ObservedGroup, step: int) -> None:
        """A group that came out shorter than when it was cut off stays cut off: it has drifted."""
        seen = self._seen.get(draw)
        if seen is None:
            self._seen[draw] = _Seen(step, group, group.longest)
        elif group.longest >= seen.longest:
            seen.group, seen.longest = group, group.longest

    def _engine(self, done: list[StepTrace]) -> EngineMeasure:
        speed = self._speed
        recent = done[-8:]
        other = sum(s.step_seconds - s.rollout_seconds for s in recent) / len(recent)
        return EngineMeasure(
            replicas=self._replicas,
            base_seconds=speed.base_seconds,
            per_sequence_seconds=speed.per_sequence_seconds,
            per_kv_token_seconds=speed.per_kv_token_seconds,
            kv_capacity=speed.kv_capacity,
            prompt_tokens=self._prompt_tokens,
            free_sequences=speed.free_sequences,
            other_seconds=other,
        )


def planner_rules(rules: TailBatchingRules, cap: int, drift: Drift) -> PlannerRules:
    """What the planner needs to know of a scenario."""
    coupling, acceptance = drift.coupling, drift.acceptance
    return PlannerRules(
        rules.prompts_per_step,
        rules.responses_per_prompt,
        cap,
        rules.max_deferral_age,
        coupling=lambda age: coupling(round(age)),
        acceptance=lambda age: acceptance(round(age)) if acceptance else 0.0,
    )
