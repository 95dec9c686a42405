"""The tables of the report: steps, sample responses, comparison. Plain strings, escaped later."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.types import PromptGroup, ScoredResponse, Verdict
from services.coordinator.outputs.charts import round_css
from services.coordinator.outputs.comparison import FIGURES
from services.coordinator.outputs.formatting import format_number, format_ratio
from services.coordinator.outputs.lines import StepLine
from services.coordinator.outputs.loaded_run import LoadedRun, round_class
from services.coordinator.outputs.samples import read_groups

_MAX_STEP_ROWS = 1000
_SHOWN_HEAD, _SHOWN_TAIL = 900, 300  # characters of a long response

# Heading, metric.
_COLUMNS = (
    ("reward", "reward/mean"),
    ("mean length", "response_length/mean"),
    ("p99", "response_length/p99"),
    ("max", "response_length/max"),
    ("launched", "tail/launched_groups"),
    ("kept", "tail/kept_groups"),
    ("deferred", "tail/deferred_groups"),
    ("queue", "tail/queue_length"),
    ("oldest", "tail/max_age"),
    ("step s", "timing_s/step"),
    ("rollout s", "timing_s/rollout"),
    ("train wait s", "timing_s/train_wait"),
    ("bias", "bias/ratio"),
    ("waste", "perf/waste"),
)


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


def steps_table(run: LoadedRun) -> StepsTable:
    """All steps, or the newest ones of a long run."""
    shown = run.steps[-_MAX_STEP_ROWS:]
    columns = [(words, name) for words, name in _COLUMNS if run.values_of(name)]
    left_out = len(run.steps) - len(shown)
    return StepsTable(
        headings=["step", "round", *(words for words, _ in columns), "weights"],
        rows=[(round_css(round_class(line)), _cells(line, columns)) for line in shown],
        note=f"The first {left_out:,} steps are left out; metrics.jsonl has them."
        if left_out
        else "",
    )


def _cells(line: StepLine, columns: Sequence[tuple[str, str]]) -> list[str]:
    values = [format_number(line.metric(name)) for _, name in columns]
    return [str(line.step), round_class(line).label, *values, str(line.weight_version)]


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
        f"weights {response.weight_version}",
    ]
    return SampleCard(
        heading=f"Step {step}, {words}",
        verdict=one.verdict.value if one.verdict else "NOT SCORED",
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
            run=format_number(run.get(name), unit),
            baseline=format_number(baseline.get(name), unit),
            ratio=format_ratio(ratios[name]) if ratios.get(name) is not None else "",
        )
        for name, (words, unit) in FIGURES.items()
    ]
