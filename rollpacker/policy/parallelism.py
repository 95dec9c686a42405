"""How many devices share one engine, and how many responses it admits (paper, section 4.2).

Online, per round kind (short and long rounds do not speak for each other): when preemptions exceed
1.05 times those of the last round of the same kind, the tensor-parallel size doubles; after four
such rounds without any, it halves; never beyond one host. Admission comes first: a cap on running
responses from the KV budget costs less than a resize. A resize whose measured cost would not be
earned back within the rounds until the next change is not made.
"""

from __future__ import annotations

from dataclasses import dataclass

_GROWTH = 1.05  # preemptions above the last round's times this call for more devices
_QUIET_ROUNDS = 4  # rounds without a preemption that call for fewer


@dataclass(frozen=True, slots=True)
class ParallelismRules:
    """Limits of the planner."""

    smallest: int = 1  # tensor-parallel size that the model needs
    devices_per_host: int = 8


@dataclass(frozen=True, slots=True)
class ParallelismState:
    """What is remembered for one round kind."""

    size: int  # tensor-parallel size
    last_preemptions: int | None = None  # of the last round of this kind
    quiet_rounds: int = 0  # in a row, without a preemption


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """Measured seconds that decide whether a resize pays."""

    resize_seconds: float
    saved_seconds_per_round: float
    rounds_until_next_change: int

    def pays(self) -> bool:
        return self.saved_seconds_per_round * self.rounds_until_next_change > self.resize_seconds


def after_round(
    rules: ParallelismRules,
    state: ParallelismState,
    preemptions: int,
    cost: ResizeCost | None = None,
) -> ParallelismState:
    """The state for the next round of the same kind. Without a measured cost a resize is made."""
    last = state.last_preemptions
    quiet = state.quiet_rounds + 1 if preemptions == 0 else 0
    if last is not None and preemptions > _GROWTH * last and preemptions > 0:
        wanted, quiet = min(state.size * 2, rules.devices_per_host), 0
    elif quiet >= _QUIET_ROUNDS:
        wanted, quiet = max(state.size // 2, rules.smallest), 0
    else:
        wanted = state.size
    if wanted != state.size and cost is not None and not cost.pays():
        wanted = state.size
    # After a resize the counts of the old size say nothing about the new one.
    return ParallelismState(wanted, preemptions if wanted == state.size else None, quiet)


def admission_cap(kv_budget_tokens: int, prompt_tokens: float, response_tokens: float) -> int:
    """Responses that a replica may run at once: what fits at their expected full length."""
    return max(1, int(kv_budget_tokens // max(1.0, prompt_tokens + response_tokens)))
