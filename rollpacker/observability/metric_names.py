"""Every metric of a step: the one place where its name, unit and meaning stand.

Records in Redis and WatchRun carry the names of this file. Files and trackers get verl's names
beside them, where verl measures the same thing in the same unit, so that its dashboards fit.
A part `N` of a name stands for a number, `<name>` for a word of letters, digits, dot, - and _.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per step; a step may lack it."""

    name: str
    unit: str
    meaning: str
    aliases: tuple[str, ...] = ()  # verl's names for it


METRICS = (
    Metric("reward/mean", "", "mean over the step's responses",
           ("critic/rewards/mean", "critic/score/mean")),
    Metric("reward/none_count", "responses", "responses that the reward service gave up on"),
    Metric("reward/zero_variance_share", "",
           "share of groups whose responses all have the same reward"),
    Metric("response_length/mean", "tokens", "mean over the step's responses"),
    Metric("response_length/p50", "tokens", "median"),
    Metric("response_length/p75", "tokens", "three quarters are at most so long"),
    Metric("response_length/p99", "tokens", "99 % are at most so long"),
    Metric("response_length/max", "tokens", "the longest"),
    Metric("response_length/capped_share", "", "share of responses that reached the cap",
           ("response_length/clip_ratio",)),
    Metric("response_length/loop_share", "",
           "share of responses that end in one token, over and over"),
    Metric("response_length/near_ties", "tokens", "positions whose choice was nearly a tie"),
    Metric("timing_s/step", "s", "the whole step", ("perf/time_per_step",)),
    Metric("timing_s/rollout", "s", "the round, up to its last accepted response",
           ("timing_s/gen",)),
    Metric("timing_s/train_wait", "s", "FinishStep: what of training the rollout did not hide"),
    Metric(
        "timing_s/reward_wait",
        "s",
        "behind the rollout, for rewards; 0 with dynamic sampling: its rollouts wait themselves",
    ),
    Metric("timing_s/apply_weights", "s", "until the first replica served the weights"),
    Metric("tail/level", "", "deferral level of the round"),
    Metric("tail/is_long", "", "1 when it was no short round"),
    Metric("tail/deferral_levels", "", "L in force"),
    Metric("tail/speculation_factor_N", "", "eta of level N in force"),
    Metric("tail/launched_groups", "groups", "groups that the round launched"),
    Metric("tail/kept_groups", "groups", "groups that it trains"),
    Metric("tail/deferred_groups", "groups", "groups that it put off"),
    Metric("tail/flat_groups", "groups",
           "groups that dynamic sampling dropped: no response had an advantage"),
    Metric("tail/deferrals_total", "groups", "deferrals since the start of the run"),
    Metric("tail/queue_length", "draws", "draws queued after the step"),
    Metric("tail/max_age", "steps", "steps since the oldest queued draw's first launch"),
    Metric("tail/race_wait_s", "s", "how long the round went on only to be sure of its winners"),
    Metric("idle/replica_share", "",
           "share of the replicas' time within the round in which they had no group: the bubbles"),
    Metric("idle/rollout_share", "", "share of the step in which no round ran"),
    Metric("idle/trainer_share", "",
           "share of the step in which the trainer neither accumulated, updated nor saved"),
    Metric("bias/trained_mean", "tokens", "mean trained length so far"),
    Metric("bias/uncensored_mean", "tokens",
           "mean length that the first launches of all draws would have come to, as estimated"),
    Metric("bias/ratio", "", "trained mean / uncensored mean; 1 is unbiased"),
    Metric("bias/weighed_ratio", "",
           "the same with each group as it counts in the loss (selection weights)"),
    Metric("bias/shorter_again_share", "",
           "share of the trained responses that had been cut off before and came out shorter"),
    Metric("selection/zero_weight_groups", "groups",
           "that turned short when they were launched again, and count nothing"),
    Metric("selection/largest_weight", "", "of a trained group"),
    Metric("selection/mean_weight", "",
           "of all trained groups so far; about 1 where responses change as they are foretold to"),
    Metric("selection/effective_share", "",
           "groups that would say as much if all counted 1, of all so far"),
    Metric("carry/drafts", "drafts", "drafts of deferred draws whose responses finished here"),
    Metric("carry/draft_tokens", "tokens", "tokens of those drafts"),
    Metric("carry/accepted_tokens", "tokens",
           "of them, confirmed by the new weights: not decoded again"),
    Metric("carry/acceptance", "", "accepted / draft tokens"),
    Metric("carry/draft_tokens_after_N_to_N", "tokens",
           "the same, of drafts with so many updates between them and their check"),
    Metric("carry/accepted_tokens_after_N_to_N", "tokens", "the same, confirmed"),
    Metric("carry/acceptance_after_N_to_N", "", "the same, as a share"),
    Metric("rollout/preemptions", "responses", "that lost their KV cache to others in the round"),
    Metric("rollout/tensor_parallel_size", "", "asked for; 0: engines keep theirs"),
    Metric("rollout/moved_groups", "groups",
           "taken over by a replica that had nothing left to run"),
    Metric("scale_down/released_replicas", "replicas", "given up before the end of the round"),
    Metric("scale_down/released_seconds", "s", "how long before its end, summed over them"),
    Metric("domain/<name>/groups", "groups", "groups of the step that are of this domain"),
    Metric("domain/<name>/reward", "", "their mean reward"),
    Metric("domain/<name>/trained_total", "groups", "trained since the start of the run"),
    Metric("domain/<name>/queued", "draws",
           "queued after the step; with those trained, all that the data has given"),
    Metric("perf/trained_tokens", "tokens",
           "trained since the start of the run, groups of selection weight 0 among them"),
    Metric("perf/generated_tokens", "tokens", "generated since the start of the run"),
    Metric("perf/waste", "", "generated / trained tokens since the start of the run"),
    Metric("perf/trained_tokens_per_second", "tokens/s",
           "of this step, without groups of selection weight 0"),
    Metric("trainer/loss", "", "the summed loss divided by the normaliser", ("actor/pg_loss",)),
    Metric("trainer/grad_norm", "", "before clipping", ("actor/grad_norm",)),
    Metric("trainer/entropy", "nats", "mean per trained token", ("actor/entropy",)),
    Metric("trainer/mismatch_kl", "nats", "engine against trainer, mean per trained token"),
    Metric("trainer/mismatch_ratio_max", "", "largest ratio of a token's two probabilities"),
    Metric("trainer/clip_fraction", "", "share of tokens at the clip", ("actor/pg_clipfrac",)),
    Metric("trainer/reference_kl", "nats", "from the initial model; 0 where it is not used"),
    Metric("trainer/correction_weight", "", "mean weight that corrects for the mismatch"),
    Metric("trainer/advantage_rms", "", "root mean square of the advantages"),
    Metric("trainer/trained_tokens", "tokens", "of this step"),
    Metric("trainer/trained_responses", "responses", "of this step"),
    Metric("trainer/micro_batches", "", "forward and backward passes"),
    Metric("trainer/padding_share", "", "share of the passes' tokens that is padding"),
    Metric("trainer/skipped_update", "", "1 when the gradient was not finite"),
    Metric("trainer/learning_rate", "", "of this update", ("actor/lr",)),
    Metric("trainer/accumulate_seconds", "s", "forward and backward of the step"),
    Metric("trainer/update_seconds", "s", "all-reduce and optimizer", ("timing_s/update_actor",)),
    Metric("trainer/checkpoint_seconds", "s", "writing the checkpoint"),
    Metric("trainer/publish_seconds", "s", "publishing the weights"),
)  # fmt: skip


def find_metric(name: str) -> Metric | None:
    """The entry of a metric's name, or None."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step under their own and under verl's names."""
    named = dict(metrics)
    for metric in METRICS:
        if metric.name in metrics:
            named |= dict.fromkeys(metric.aliases, metrics[metric.name])
    return named


def prometheus_name(name: str) -> str:
    """A metric as Prometheus spells it: `reward/mean` is `rollpacker_reward_mean`."""
    return f"rollpacker_{re.sub('[^a-zA-Z0-9]+', '_', name)}"


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    return tuple((re.compile(_pattern(metric.name)), metric) for metric in METRICS)


def _pattern(name: str) -> str:
    numbered = re.sub(r"(?<=_)N(?=_|$)", r"\\d+", name)
    return numbered.replace("<name>", "[A-Za-z0-9._-]+")
