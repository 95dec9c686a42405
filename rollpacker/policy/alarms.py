"""Alarms: what a person would want to be told about a run, before hours are lost.

Pure functions over the newest records of a run. An alarm is raised while its rule holds, and each
says what to do. A raised alarm is the metric `alarm/NAME` of the step, with the value 1; a step
without alarms has no such metric. Nothing stops because of one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollpacker.types import StepRecord

PREFIX = "alarm/"
WINDOW = 20  # records that rules look at
_FEW = 3  # steps before anything is said
_NEWEST = 5  # steps that a rule of shares or rewards looks at
_MOST_TRUNCATED = 0.5
_MOST_ZERO_VARIANCE = 0.9
_MOST_LOOPS = 0.05
_MISMATCH_FLOOR = 1e-3  # nats per token; below it nothing is wrong
_MISMATCH_RISE = 3.0  # of the newest steps over those before
_BIAS_BOUNDS = (0.9, 1.1)
Records = Sequence[StepRecord]  # consecutive steps, the newest last; at most WINDOW are looked at


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule with its words."""

    name: str
    meaning: str
    remedy: str
    holds: Callable[[Records], bool]

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.meaning}; {self.remedy}"


def raised_alarms(records: Records) -> list[Alarm]:
    """The alarms that hold after the newest of the records."""
    window = records[-WINDOW:]
    return [alarm for alarm in ALARMS if alarm.holds(window)]


def _no_reward(records: Records) -> bool:
    rewards = _values(records, "reward/mean")[-_NEWEST:]
    return len(rewards) >= _FEW and not any(rewards)


def _truncated(records: Records) -> bool:
    return _newest_mean(records, "response_length/capped_share") > _MOST_TRUNCATED


def _zero_variance(records: Records) -> bool:
    return _newest_mean(records, "reward/zero_variance_share") > _MOST_ZERO_VARIANCE


def _mismatch_rises(records: Records) -> bool:
    values = _values(records, "trainer/mismatch_kl")
    if len(values) < 2 * _NEWEST:
        return False
    newest = statistics.median(values[-_NEWEST:])
    before = statistics.median(values[:-_NEWEST])
    return newest > max(_MISMATCH_FLOOR, _MISMATCH_RISE * before)


def _biased(records: Records) -> bool:
    """A ladder starts biased and mends itself with its first long rounds; so a whole window."""
    ratios = _values(records, "bias/weighed_ratio")
    low, high = _BIAS_BOUNDS
    return len(ratios) == WINDOW and not any(low <= ratio <= high for ratio in ratios)


def _loops(records: Records) -> bool:
    return _newest_mean(records, "response_length/loop_share") > _MOST_LOOPS


ALARMS = (
    Alarm(
        "no_reward",
        "no response has been rewarded in the last steps",
        "look at samples and their verdicts: is the answer in the form that the grader reads"
        " (answer_after, chat template), and can the model solve any of these prompts?",
        _no_reward,
    ),
    Alarm(
        "truncated",
        "more than half of the responses end at the cap",
        "raise sampling.max_response_tokens, or find out why they do not stop (stop tokens, chat"
        " template)",
        _truncated,
    ),
    Alarm(
        "zero_variance",
        "in more than nine of ten groups all responses have the same reward, so they teach nothing",
        "take harder prompts if rewards are high and easier ones if they are low, or raise"
        " responses_per_prompt",
        _zero_variance,
    ),
    Alarm(
        "mismatch_rising",
        "engine and trainer drift apart (trainer/mismatch_kl)",
        "check that both use one dtype and the newest weights; lower the learning rate, or set"
        " trainer.rollout_correction",
        _mismatch_rises,
    ),
    Alarm(
        "length_bias",
        "trained lengths have been off the uncensored ones for the whole window"
        " (bias/weighed_ratio)",
        "mode paper drops long responses by design; in mode exact look at the queue: do long"
        " rounds run, and does the run end before they do? A high bias/shorter_again_share says"
        " that weights change responses before they come again: set selection_weights, or take mode"
        " auto",
        _biased,
    ),
    Alarm(
        "token_loops",
        "responses end in one token, over and over",
        "the policy has collapsed or the engine is broken: look at samples, go back to an earlier"
        " checkpoint, lower the learning rate",
        _loops,
    ),
)


def find_alarm(metric: str) -> Alarm | None:
    """The alarm behind a metric of the name `alarm/NAME`, or None."""
    return next((alarm for alarm in ALARMS if metric == PREFIX + alarm.name), None)


def _newest_mean(records: Records, name: str) -> float:
    """Mean over the newest steps; 0 while there are few."""
    values = _values(records, name)[-_NEWEST:]
    return statistics.fmean(values) if len(values) >= _FEW else 0.0


def _values(records: Records, name: str) -> list[float]:
    return [record.metrics[name] for record in records if name in record.metrics]
