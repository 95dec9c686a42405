"""How far the current round is: told to watchers, never stored."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan
from rollpacker.types import RoundKind, StepRecord


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """One look at the round."""

    step: int
    phase: str  # "rollout", "training" or "validation"
    round_kind: RoundKind = RoundKind.LONG
    level: int = 0
    launched: int = 0
    finished: int = 0
    kept: int = 0

    @classmethod
    def of_round(cls, round_: Round, plan: RoundPlan, phase: str) -> RoundProgress:
        """While the round runs."""
        return cls(
            step=plan.step,
            phase=phase,
            round_kind=plan.kind,
            level=plan.level,
            launched=round_.launched_count,
            finished=round_.complete_count,
            kept=plan.keep,
        )

    @classmethod
    def of_record(cls, record: StepRecord, phase: str) -> RoundProgress:
        """After the round."""
        count = len(record.draws)
        return cls(record.step, phase, record.round_kind, record.level, count, count, count)
