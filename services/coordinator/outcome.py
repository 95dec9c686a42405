"""What a finished round means for the run, and the record of a finished step. Pure but for
the clock's readings, which are arguments."""

from __future__ import annotations

import dataclasses

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.store.records import RunState, StepOutcome
from rollpacker.types import DeferredDraw, StepRecord, StepResult
from services.coordinator.domains import DomainOf, add_domains, domain_metrics
from services.coordinator.ladder_planning import memory_after, selection_of
from services.coordinator.round_result import RoundResult
from services.coordinator.step_metrics import (
    carry_over_metrics,
    idle_metrics,
    ladder_metrics,
    next_totals,
    replica_metrics,
    round_metrics,
    scale_down_metrics,
)


def round_outcome(
    state: RunState,
    rules: TailBatchingRules,
    planned: RoundPlan,
    result: RoundResult,
    domain_of: DomainOf,
    *,
    started: float,
    ended: float,
) -> StepOutcome:
    """What the step will train and commit; `state` is behind the prompts that it took.

    Times are seconds since the Unix epoch.
    """
    finish, groups = result.finish, result.groups
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        weight_version=state.weight_version + 1,
        weights_uri="",
        long_round=False,
        deferred=_next_queue(state, planned, finish),
        totals=add_domains(next_totals(state, groups, finish), groups, domain_of),
        ladder_memory=memory_after(state, result),
    )
    trained = tuple(group.draw for group in groups)
    record = StepRecord(
        step=state.step,
        round_kind=planned.kind,
        level=planned.level,
        start_time=started,
        rollout_end_time=ended,
        end_time=0.0,
        weight_version=after.weight_version,
        draws=trained,
        flat_draws=result.flat_draws,
        metrics={
            **round_metrics(planned, groups, finish, after),
            **ladder_metrics(rules.speculation_factors),
            **carry_over_metrics(result.checked_drafts),
            **scale_down_metrics(result.released),
            "rollout/moved_groups": float(result.moved_groups),
            **domain_metrics(groups, after, domain_of),
            "timing_s/apply_weights": result.apply_seconds,
            "timing_s/reward_wait": result.reward_wait_seconds,
            "idle/replica_share": result.idle_share,
            **replica_metrics(result.preemptions, result.tensor_parallel_size),
        },
    )
    return StepOutcome(trained, after, record)


def finished_record(
    outcome: StepOutcome, result: StepResult, *, train_wait: float, now: float
) -> StepRecord:
    """The record to commit: what training and the commit add. `now`: seconds since the epoch."""
    record = outcome.record
    lengths = outcome.next_state.totals.trained_lengths
    trained = sum(length * count for length, count in lengths.items())
    seconds = now - record.start_time
    step_tokens = result.metrics.get("trained_tokens", 0.0)
    metrics = {
        **record.metrics,
        **{f"trainer/{name}": value for name, value in result.metrics.items()},
        "timing_s/step": seconds,
        "timing_s/train_wait": train_wait,
        "perf/trained_tokens": float(trained),
        "perf/trained_tokens_per_second": step_tokens / seconds if seconds > 0 else 0.0,
    }
    return dataclasses.replace(record, end_time=now, metrics=metrics | idle_metrics(metrics))


def _next_queue(
    state: RunState, planned: RoundPlan, finish: FinishRound
) -> tuple[DeferredDraw, ...]:
    """The queue after a round: what it did not take, then what it deferred; by level."""
    taken = {draw.id for draw in planned.queued}
    queue = [item for item in state.deferred if item.draw.id not in taken]
    deferred = selection_of(state).after_race(finish.deferred, finish.cuts)
    return tuple(sorted([*queue, *deferred], key=lambda item: item.draw.level))
