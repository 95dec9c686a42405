"""docs/metrics.md as `python -m rollpacker.metrics_reference` writes it from the code.

A test compares the file with this, so the document cannot fall behind the code.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollpacker.observability.metric_names import METRICS, prometheus_name
from rollpacker.policy.alarms import ALARMS, PREFIX, WINDOW

_HEAD = """# Metrics of a step

What a committed step tells of itself: in `metrics.jsonl`, in trackers, in `step_finished` of
WatchRun, and at the coordinator's `/metrics` for the newest step (`reward/mean` as
`{example}`, with the label `run`). Files and trackers carry verl's name too, where
verl measures the same. Any metric may be missing from a step. Written from the code by
`python -m rollpacker.metrics_reference > docs/metrics.md`.
"""
_ALARMS = f"""## Alarms

An alarm that is raised is a metric of the step with the value 1, a warning in the coordinator's
log, and a line in `rollpacker watch` and on the web page. Rules look at the newest {WINDOW} steps
(`rollpacker/policy/alarms.py`); nothing stops because of one.

| metric | when | what to do |
|---|---|---|
"""

_SERVICES = """
## At /metrics of the services

Off until `ROLLPACKER_<SERVICE>_METRICS_ADDRESS` is set. Counters end in `_total` there. All of them
have the usual `process_...` figures too.

| service | figure | labels |
|---|---|---|
| all | `rollpacker_rpc_calls`, `rollpacker_rpc_seconds` (histogram), `rollpacker_rpc_running` | `method`, `code` |
| coordinator | `rollpacker_coordinator_leads`, `rollpacker_workers` | `kind` |
| | `rollpacker_device_held` | `device`, `worker` |
| | `rollpacker_run_steps`, `rollpacker_run_planned_steps`, `rollpacker_run_queued_draws` | `run`, `level` |
| | `rollpacker_round_groups` | `run`, `groups` (launched, finished, kept) |
| | `rollpacker_held_out_score`, `rollpacker_held_out_weight_version` | `run`, `set`, `score` |
| | `rollpacker_alarm`, and every metric above | `run`, `alarm` |
| rollout | `rollpacker_engine_weight_version`, `rollpacker_engine_running_responses`, `rollpacker_engine_waiting_responses` | |
| | `rollpacker_engine_slots`, `rollpacker_engine_kv_usage_ratio`, `rollpacker_engine_generated_tokens`, `rollpacker_engine_preemptions` | |
| reward | `rollpacker_reward_slots`, `rollpacker_reward_busy_slots`, `rollpacker_reward_worker_restarts` | |
| | `rollpacker_reward_verdicts` | `grader`, `verdict` |
| | `rollpacker_reward_killed_runs`, `rollpacker_reward_rechecked_runs`, `rollpacker_reward_false_kills` | |
| trainer | `rollpacker_trainer_weight_version`, `rollpacker_trainer_accumulated_groups`, `rollpacker_trainer_ranks` | `run` |
| | `rollpacker_trainer_activity`: 1 for what it is doing | `activity` |
"""  # noqa: E501  rows of a table


def metrics_reference() -> str:
    """The whole document."""
    head = _HEAD.format(example=prometheus_name("reward/mean"))
    return "\n".join([head, *_families(), _ALARMS + "\n".join(_alarms())]) + "\n" + _SERVICES


def _families() -> Iterator[str]:
    family = ""
    for metric in METRICS:
        if metric.name.partition("/")[0] != family:
            if family:
                yield ""
            family = metric.name.partition("/")[0]
            yield f"## `{family}/`\n\n| metric | unit | meaning | verl's name |\n|---|---|---|---|"
        aliases = ", ".join(f"`{alias}`" for alias in metric.aliases)
        yield f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {aliases} |"
    yield ""


def _alarms() -> Iterator[str]:
    for alarm in ALARMS:
        yield f"| `{PREFIX}{alarm.name}` | {alarm.meaning} | {alarm.remedy} |"


if __name__ == "__main__":
    print(metrics_reference(), end="")
