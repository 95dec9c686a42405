"""The tables of the report: steps, sample responses, comparison. Plain strings, escaped later."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rollpacker.types import PromptGroup, ScoredResponse, Verdict
from services.coordinator.outputs import svg
from services.coordinator.outputs.charts import round_css
from services.coordinator.outputs.comparison import FIGURES, format_figure
from services.coordinator.outputs.formatting import (
    format_fixed,
    format_number,
    format_ratio,
    format_share,
)
from services.coordinator.outputs.lines import StepLine
from services.coordinator.outputs.loaded_run import NOT_SCORED, LoadedRun, round_class
from services.coordinator.outputs.samples import read_groups

_MAX_STEP_ROWS = 1000
_SHOWN_HEAD, _SHOWN_TAIL = 900, 300  # characters of a long response

# Heading, metric, decimals.
_COLUMNS = (
    ("reward", "reward/mean", 3),
    ("mean tokens", "response_length/mean", 1),
    ("p99", "response_length/p99", 0),
    ("max", "response_length/max", 0),
    ("launched", "tail/launched_groups", 0),
    ("kept", "tail/kept_groups", 0),
    ("deferred", "tail/deferred_groups", 0),
    ("queue", "tail/queue_length", 0),
    ("oldest", "tail/max_age", 0),
    ("step s", "timing_s/step", 2),
    ("rollout s", "timing_s/rollout", 2),
    ("train wait s", "timing_s/train_wait", 2),
    ("bias", "bias/ratio", 3),
    ("waste", "perf/waste", 2),
)
_Column = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class StepsTable:
    """A row per step."""

    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]  # CSS class of the round, cells
    note: str


@dataclass(frozen=True, slots=True)
class SampleCard:
    """One response, for reading."""

    heading: str
    verdict: str
    right: bool
    facts: str
    text: str


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of two runs."""

    name: str
    run: str
    baseline: str
    ratio: str
    bars: Markup


def steps_table(run: LoadedRun) -> StepsTable:
    """All steps, or the newest ones of a long run."""
    shown = run.steps[-_MAX_STEP_ROWS:]
    columns = [column for column in _COLUMNS if run.values_of(column[1])]
    left_out = len(run.steps) - len(shown)
    return StepsTable(
        headings=["step", "round", *(words for words, _, _ in columns)],
        rows=[(round_css(round_class(line)), _cells(line, columns)) for line in shown],
        note=f"The first {left_out:,} steps are left out; metrics.jsonl has them."
        if left_out
        else "",
    )


def _cells(line: StepLine, columns: Sequence[_Column]) -> list[str]:
    values = [format_fixed(line.metric(name), decimals) for _, name, decimals in columns]
    return [str(line.step), round_class(line).label, *values]


def verdict_rows(run: LoadedRun) -> list[tuple[str, str, str]]:
    """Verdict, its share in the first tenth and in the last tenth of steps; most common first."""
    counted = [run.verdicts[line.step] for line in run.steps if line.step in run.verdicts]
    size = math.ceil(len(counted) / 10)
    first: Counter[str] = sum(counted[:size], Counter())
    last: Counter[str] = sum(counted[len(counted) - size :], Counter())
    return [
        (
            verdict,
            format_share(first[verdict] / first.total()),
            format_share(last[verdict] / last.total()),
        )
        for verdict, _ in (first + last).most_common()
    ]


def sample_cards(run: LoadedRun) -> list[SampleCard]:
    """A right, a wrong and the longest response of the first and of the last step."""
    cards = []
    ends = dict.fromkeys([line.step for line in (*run.steps[:1], *run.steps[-1:])])
    for step in ends:
        path = run.files.samples_file(step)
        if path.exists():
            cards += _cards_of_step(step, read_groups(path))
    return cards


def _cards_of_step(step: int, groups: Sequence[PromptGroup]) -> list[SampleCard]:
    scored = [(group, one) for group in groups for one in group.responses]
    right = [item for item in scored if item[1].verdict is Verdict.CORRECT]
    wrong = [item for item in scored if item[1].verdict not in (Verdict.CORRECT, None)]
    longest = sorted(scored, key=lambda item: -len(item[1].response.token_ids))
    chosen = {
        (group.draw.id, one.response.index): (words, group, one)
        for words, found in (("longest", longest), ("wrong", wrong), ("right", right))
        for group, one in found[:1]
    }
    return [_card(step, *item) for item in reversed(chosen.values())]


def _card(step: int, words: str, group: PromptGroup, one: ScoredResponse) -> SampleCard:
    response = one.response
    reward = "no reward" if one.reward is None else f"reward {format_number(one.reward)}"
    facts = [
        reward,
        f"advantage {one.advantage:+.2f}",
        f"{len(response.token_ids):,} tokens",
        f"ended by {response.finish_reason.value}",
        f"draw {group.draw.id}, response {response.index}",
        f"first launched in step {group.draw.first_step}",
    ]
    return SampleCard(
        heading=f"Step {step}, {words}",
        verdict=one.verdict.value if one.verdict else NOT_SCORED,
        right=one.verdict is Verdict.CORRECT,
        facts=" · ".join(facts),
        text=shortened(visible(one.text)),
    )


def visible(text: str) -> str:
    """Control and formatting characters (but line ends and tabs) as U+FFFD."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\n\t"
        else char
        for char in text
    )


def shortened(text: str) -> str:
    """The head and the tail of a long text, and how much lies between."""
    left_out = len(text) - _SHOWN_HEAD - _SHOWN_TAIL
    if left_out <= 0:
        return text
    middle = f"\n… {left_out:,} characters left out …\n"
    return text[:_SHOWN_HEAD] + middle + text[-_SHOWN_TAIL:]


def comparison_rows(comparison: Mapping[str, Any]) -> list[ComparisonRow]:
    """The figures of both runs, with their ratios where there are some."""
    run, baseline, ratios = (comparison[key] for key in ("run", "baseline", "ratios"))
    return [
        ComparisonRow(
            name=words,
            run=format_figure(name, run[name]),
            baseline=format_figure(name, baseline[name]),
            ratio=format_ratio(ratios[name]) if ratios.get(name) is not None else "",
            bars=_bars(run[name], baseline[name]) if ratios.get(name) is not None else Markup(""),
        )
        for name, (words, _) in FIGURES.items()
    ]


def _bars(run: float, baseline: float, width: float = 260) -> Markup:
    """Two bars to one scale: the run above, the baseline below."""
    longest = max(run, baseline)
    upper = svg.rectangle(0, 2, width * run / longest, 8, "after")
    lower = svg.rectangle(0, 12, width * baseline / longest, 8, "before")
    return svg.drawing(width, 22, f"{run:g} against {baseline:g}", upper, lower)
