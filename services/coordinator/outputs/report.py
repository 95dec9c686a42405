"""report.html: a run on one page, in one file, without network and without scripts.

Whatever comes from the run is escaped: texts by Jinja's autoescape, SVG by `svg.element`. The page
carries a content security policy that allows its own style block (by hash) and nothing else, so
even markup that slipped through could not run or load anything. Control characters of responses
are made visible, so that a response cannot reorder the words around it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from services.coordinator.outputs import charts, round_charts
from services.coordinator.outputs.formatting import (
    MISSING,
    format_duration,
    format_number,
    format_ratio,
    format_score,
    format_time,
)
from services.coordinator.outputs.loaded_run import LoadedRun, round_class
from services.coordinator.outputs.report_tables import (
    comparison_rows,
    sample_cards,
    steps_table,
    verdict_rows,
)

_TEMPLATE = "report.html"
_PROMPTS, _RESPONSES = "prompts_per_step", "responses_per_prompt"  # settings

# Metric, title, what it means, reference line.
SCHEDULING_CURVES = (
    ("tail/queue_length", "Long-prompt queue", "draws waiting after the step", None),
    ("tail/max_age", "Oldest queued draw", "steps since its first launch", None),
    ("bias/ratio", "Length bias", "trained / uncensored length so far; 1: none", 1.0),
    ("bias/weighed_ratio", "Length bias, weighed", "each group as it counts; 1: none", 1.0),
    ("perf/waste", "Waste", "generated / trained tokens so far; 1: none", 1.0),
    ("perf/trained_tokens_per_second", "Speed", "trained tokens per second", None),
    ("tail/race_wait_s", "Race wait", "seconds until the other groups had passed the key", None),
)
TRAINER_CURVES = (
    ("trainer/loss", "Loss", "policy loss of the update", None),
    ("trainer/grad_norm", "Gradient norm", "before clipping", None),
    ("trainer/entropy", "Entropy", "nats per token", None),
    ("trainer/clip_fraction", "Clipped", "share of tokens at the clip", None),
    ("trainer/mismatch_kl", "Engine mismatch", "KL of engine and trainer, nats per token", None),
    (
        "trainer/mismatch_ratio_max",
        "Largest mismatch",
        "largest probability ratio of a token",
        None,
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A headline figure."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A small chart with its words."""

    title: str
    note: str
    latest: str
    chart: Markup


def build_report(
    run: LoadedRun, summary: Mapping[str, Any], comparison: Mapping[str, Any] | None
) -> str:
    """The page. summary: of the same run; comparison: see `compare_runs`."""
    source = resources.files(__package__ or __name__).joinpath(_TEMPLATE).read_text("utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        policy=content_security_policy(source),
        run=run,
        subtitle=_subtitle(run),
        figures=headline_figures(run, summary),
        kinds=[(charts.round_css(kind), kind.label) for kind in _kinds(run)],
        reward_chart=charts.reward_chart(run),
        smoothing=charts.smoothing_window(len(run.steps)),
        before_after=charts.before_after_chart(run),
        timeline=round_charts.timeline_chart(run),
        timeline_note=_timeline_note(run),
        histogram=round_charts.length_histogram(run),
        length_chart=round_charts.length_chart(run),
        scheduling=_curves(run, SCHEDULING_CURVES),
        trainer=_curves(run, TRAINER_CURVES),
        comparison=comparison,
        comparison_rows=comparison_rows(comparison) if comparison else [],
        table=steps_table(run),
        verdicts=verdict_rows(run),
        samples=sample_cards(run),
        settings=json.dumps(run.settings, indent=2, sort_keys=True, default=str),
    )


def report_style() -> str:
    """The style of the report; the pictures need its classes wherever they are shown."""
    source = resources.files(__package__ or __name__).joinpath(_TEMPLATE).read_text("utf-8")
    return _style(source)


def _style(page: str) -> str:
    return page.partition("<style>")[2].partition("</style>")[0]


def content_security_policy(page: str) -> str:
    """Nothing but the page's own style block, which has no template tags in it."""
    style = _style(page)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def headline_figures(run: LoadedRun, summary: Mapping[str, Any]) -> list[Figure]:
    """The figures at the top of the page."""
    tokens = summary["response_tokens"]
    rounds = ", ".join(f"{count} {kind}" for kind, count in _round_counts(run).items())
    return [
        Figure(
            "Held-out score",
            _change(summary["validation_before"], summary["validation_after"]),
            "initial weights → last measurement",
        ),
        Figure(
            "Training reward",
            _change(summary["reward_first"], summary["reward_last"]),
            "first → last tenth of steps" + _unscored(run),
        ),
        Figure("Steps", f"{summary['steps']:,}", rounds or "none committed yet"),
        Figure(
            "Step time",
            format_number(summary["step_seconds_mean"], "s"),
            f"mean; rollout {format_number(summary['rollout_seconds_mean'], 's')}",
        ),
        Figure(
            "Trained tokens per second",
            format_number(summary["trained_tokens_per_second"]),
            f"{summary['trained_groups']:,} prompt groups trained",
        ),
        Figure(
            "Response length",
            format_number(tokens["p50"]),
            f"tokens, median; p99 {format_number(tokens['p99'])},"
            f" max {format_number(tokens['max'])}",
        ),
        Figure(
            "Deferrals",
            format_number(summary["deferrals"]),
            f"{format_number(summary['undrained'])} draws left in the queue",
        ),
        Figure(
            "Bias and waste",
            f"{format_ratio(summary['bias_ratio'])} · {format_ratio(summary['waste'])}",
            "length bias · generated / trained tokens",
        ),
    ]


def _change(before: float | None, after: float | None) -> str:
    if before is None and after is None:
        return MISSING
    return f"{format_score(before)} → {format_score(after)}"


def _unscored(run: LoadedRun) -> str:
    count = run.sum_of("reward/none_count")
    return f"; {count:,.0f} responses without a reward" if count else ""


def _round_counts(run: LoadedRun) -> dict[str, int]:
    kinds = [line.round_kind for line in run.steps]
    return {kind: kinds.count(kind) for kind in ("short", "long", "drain") if kind in kinds}


def _kinds(run: LoadedRun) -> list[Any]:
    return sorted({round_class(line) for line in run.steps}, key=lambda kind: kind.sort_key)


def _subtitle(run: LoadedRun) -> str:
    if not run.steps:
        return "no step committed yet"
    start, end = run.steps[0].start_time, run.steps[-1].end_time
    words = [format_time(start), f"{format_duration(end - start)} from first round to last commit"]
    schedule = run.settings.get("tail_batching")
    if isinstance(schedule, Mapping) and schedule.keys() >= {_PROMPTS, _RESPONSES}:
        words.append(f"{schedule[_PROMPTS]} prompts × {schedule[_RESPONSES]} responses per step")
    return " · ".join(words)


def _timeline_note(run: LoadedRun) -> str:
    shown = sum(len(strip) for strip in round_charts.timeline_steps(run))
    if shown == len(run.steps):
        return ""
    return f"The first and the last {shown // 2} of {len(run.steps):,} steps are shown."


def _curves(run: LoadedRun, wanted: Sequence[tuple[str, str, str, float | None]]) -> list[Curve]:
    """Those of the wanted curves that the run has values for."""
    curves = []
    for name, title, note, reference in wanted:
        latest = run.last_of(name)
        if latest is not None:
            chart = charts.small_chart(run, name, reference)
            curves.append(Curve(title, note, format_number(latest), chart))
    return curves
