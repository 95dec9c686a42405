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


def metrics_reference() -> str:
    """The whole document."""
    head = _HEAD.format(example=prometheus_name("reward/mean"))
    return "\n".join([head, *_families(), _ALARMS + "\n".join(_alarms())]) + "\n"


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
