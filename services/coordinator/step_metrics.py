"""The metrics of a step: one line of metrics.jsonl. Names and units are in docs/outputs.md."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from rollpacker.policy.bias_meter import BiasMeter
from rollpacker.policy.commands import FinishRound
from rollpacker.policy.selection_weights import WeighedSums
from rollpacker.policy.tail_batching import RoundPlan
from rollpacker.store.records import RunState, Totals
from rollpacker.types import FinishReason, PromptGroup, Response, RoundKind
from services.coordinator.carry_over import CheckedDraft

_TRAINER_PARTS = ("accumulate", "update", "checkpoint", "publish")
_LOOP_TOKENS = 32  # so many equal ones at the end are a loop
# Optimizer updates between a draft and its check: the ranges that metrics tell apart.
_UPDATES_BETWEEN = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64))


def next_totals(state: RunState, groups: Sequence[PromptGroup], finish: FinishRound) -> Totals:
    """The run's sums after a step; `state` is before it."""
    totals, meter = state.totals, _meter(state.totals)
    lengths = {
        group.draw.id: {s.response.index: len(s.response.token_ids) for s in group.responses}
        for group in groups
    }
    meter.add_round(state.deferred, lengths, finish)
    weighed = _weighed(totals)
    for group in groups:
        own = lengths[group.draw.id]
        weighed = weighed.plus(group.selection_weight, list(own.values()))
    return dataclasses.replace(
        totals,
        trained_tokens=totals.trained_tokens + sum(sum(own.values()) for own in lengths.values()),
        generated_tokens=totals.generated_tokens + finish.generated_tokens,
        deferrals=totals.deferrals + len(finish.deferred),
        trained_groups=totals.trained_groups + len(groups),
        trained_lengths=dict(meter.trained_lengths),
        cut_lengths=dict(meter.cut_lengths),
        first_lengths=meter.first_lengths,
        weighed=dataclasses.asdict(weighed),
    )


def round_metrics(
    plan: RoundPlan, groups: Sequence[PromptGroup], finish: FinishRound, after: RunState
) -> dict[str, float]:
    """What is known when the round is over; `after` is the state that the step will commit."""
    return {
        **_reward_metrics(groups),
        **_length_metrics(groups),
        **_tail_metrics(plan, finish, after),
        **_bias_metrics(after),
        "selection/zero_weight_groups": float(sum(not g.selection_weight for g in groups)),
        "selection/largest_weight": max((g.selection_weight for g in groups), default=0.0),
        "timing_s/rollout": finish.rollout_seconds,
    }


def idle_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """For how much of a step no round ran, and no training; from its other metrics."""
    seconds = metrics["timing_s/step"]
    busy = {
        "rollout": metrics["timing_s/rollout"],
        "trainer": sum(metrics.get(f"trainer/{part}_seconds", 0.0) for part in _TRAINER_PARTS),
    }
    return {
        f"idle/{name}_share": min(1.0, max(0.0, 1 - spent / seconds)) if seconds > 0 else 0.0
        for name, spent in busy.items()
    }


def carry_over_metrics(checked: Sequence[CheckedDraft]) -> dict[str, float]:
    """How the drafts of deferred draws fared, where their responses finished in this round."""
    metrics = {"carry/drafts": float(len(checked)), **_carried(checked, "")}
    for least, most in _UPDATES_BETWEEN:
        some = [draft for draft in checked if least <= draft.updates_between <= most]
        if some:
            metrics |= _carried(some, f"_after_{least}_to_{most}")
    return metrics


def ladder_metrics(factors: Sequence[float]) -> dict[str, float]:
    """The ladder in force."""
    return {
        "tail/deferral_levels": float(len(factors)),
        **{f"tail/speculation_factor_{level}": eta for level, eta in enumerate(factors)},
    }


def replica_metrics(preemptions: int, tensor_parallel_size: int) -> dict[str, float]:
    """What the planner of sizes goes by, and what it asked for."""
    return {
        "rollout/preemptions": float(preemptions),
        "rollout/tensor_parallel_size": float(tensor_parallel_size),
    }


def scale_down_metrics(released: Sequence[float]) -> dict[str, float]:
    """The replicas that a round gave up early, and how long before its end."""
    return {
        "scale_down/released_replicas": float(len(released)),
        "scale_down/released_seconds": sum(released),
    }


def _carried(checked: Sequence[CheckedDraft], suffix: str) -> dict[str, float]:
    draft_tokens = sum(draft.draft_tokens for draft in checked)
    accepted_tokens = sum(draft.accepted_tokens for draft in checked)
    return {
        f"carry/draft_tokens{suffix}": float(draft_tokens),
        f"carry/accepted_tokens{suffix}": float(accepted_tokens),
        f"carry/acceptance{suffix}": accepted_tokens / draft_tokens if draft_tokens else 0.0,
    }


def _reward_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    rewards = [scored.reward for group in groups for scored in group.responses]
    given = [reward for reward in rewards if reward is not None]
    flat = sum(len({s.reward for s in group.responses}) <= 1 for group in groups)
    return {
        "reward/mean": statistics.fmean(given) if given else 0.0,
        "reward/none_count": float(len(rewards) - len(given)),
        "reward/zero_variance_share": flat / len(groups) if groups else 0.0,
    }


def _length_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    responses = [scored.response for group in groups for scored in group.responses]
    lengths = sorted(len(response.token_ids) for response in responses) or [0]  # all were flat
    capped = sum(response.finish_reason is FinishReason.LENGTH for response in responses)
    return {
        "response_length/mean": statistics.fmean(lengths),
        "response_length/p50": _quantile(lengths, 0.5),
        "response_length/p75": _quantile(lengths, 0.75),
        "response_length/p99": _quantile(lengths, 0.99),
        "response_length/max": float(lengths[-1]),
        "response_length/capped_share": capped / len(lengths),
        "response_length/loop_share": sum(map(_ends_in_loop, responses)) / len(lengths),
        "response_length/near_ties": float(sum(r.near_tie_count for r in responses)),
    }


def _ends_in_loop(response: Response) -> bool:
    end = response.token_ids[-_LOOP_TOKENS:]
    return len(end) == _LOOP_TOKENS and end.count(end[0]) == _LOOP_TOKENS


def _tail_metrics(plan: RoundPlan, finish: FinishRound, after: RunState) -> dict[str, float]:
    ages = [item.draw.age(after.step) for item in after.deferred]
    return {
        "tail/level": float(plan.level),
        "tail/is_long": float(plan.kind is not RoundKind.SHORT),
        "tail/launched_groups": float(
            len(finish.winners) + len(finish.deferred) + len(finish.flat)
        ),
        "tail/kept_groups": float(len(finish.winners)),
        "tail/deferred_groups": float(len(finish.deferred)),
        "tail/flat_groups": float(len(finish.flat)),
        "tail/deferrals_total": float(after.totals.deferrals),
        "tail/queue_length": float(len(after.deferred)),
        "tail/max_age": float(max(ages, default=0)),
        "tail/race_wait_s": finish.race_wait_seconds,
    }


def _bias_metrics(after: RunState) -> dict[str, float]:
    bias = _meter(after.totals).read(after.deferred)
    generated, trained = after.totals.generated_tokens, after.totals.trained_tokens
    weighed = _weighed(after.totals)
    weighed_ratio = weighed.mean_length / bias.uncensored_mean if bias.uncensored_mean else 1.0
    return {
        "bias/trained_mean": bias.trained_mean,
        "bias/uncensored_mean": bias.uncensored_mean,
        "bias/ratio": bias.ratio,
        "bias/weighed_ratio": weighed_ratio,
        "selection/effective_share": weighed.effective_share,
        "selection/mean_weight": weighed.mean_weight,
        "bias/shorter_again_share": bias.shorter_again_share,
        "perf/generated_tokens": float(generated),
        "perf/waste": generated / trained if trained else 0.0,
    }


def _weighed(totals: Totals) -> WeighedSums:
    return WeighedSums(**totals.weighed)


def _meter(totals: Totals) -> BiasMeter:
    return BiasMeter(totals.trained_lengths, totals.cut_lengths, totals.first_lengths)


def _quantile(ordered: Sequence[int], share: float) -> float:
    """The smallest value with at least this share of the values at or below it."""
    place = max(0, -(-len(ordered) * share // 1) - 1)
    return float(ordered[int(place)])
