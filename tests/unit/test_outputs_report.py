"""report.html: escaped, self-contained, bound by its policy, and whole whatever is missing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from outputs_example_run import RUN_ID, ExampleRun

from rollpacker.types import Draw, PromptGroup, RoundKind, StepRecord
from services.coordinator.outputs import RunOutputs, write_comparison
from services.coordinator.outputs.lines import step_line, step_line_to_json
from services.coordinator.outputs.report_tables import shortened, visible
from services.coordinator.outputs.run_directory import LineFile

ATTACKS = [
    "<script>alert(1)</script>",
    "</pre></style><script src=//evil.example/x.js></script>",
    '" onload="alert(1)" x=\'<img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}]]><!--",
]
_VOID = {"meta", "br", "img", "link", "input", "hr"}


class _Page(HTMLParser):
    """Checks that tags nest, and collects what matters for safety."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = str(dict(attrs)["content"])
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def _parse(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def _write(directory: Path, steps: int = 12, text: str = "", settings: object = None) -> str:
    outputs = RunOutputs(directory, RUN_ID, "exact", {"note": settings})
    outputs.write_validation(0, "held_out", {"accuracy": 0.2, "count": 100})
    for record, groups in ExampleRun(seed=6).steps(steps):
        outputs.write_step(record, [_with_text(group, text) for group in groups])
    outputs.write_validation(steps, "held_out", {"accuracy": 0.6, "count": 100})
    outputs.finish()
    return (directory / "report.html").read_text()


def _with_text(group: PromptGroup, text: str) -> PromptGroup:
    if not text:
        return group
    return replace(group, responses=tuple(replace(one, text=text) for one in group.responses))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _write(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_text_of_a_response_stays_text(tmp_path: Path, attack: str) -> None:
    html = _write(tmp_path, steps=2, text=attack, settings=attack)
    page = _parse(html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "link"}
    assert attack not in html
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


@pytest.mark.parametrize("attack", ATTACKS)
def test_names_from_the_run_stay_text(tmp_path: Path, attack: str) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, attack, {attack: attack})
    record, groups = next(ExampleRun(seed=6).steps(1))
    named = replace(groups[0], draw=replace(groups[0].draw, prompt_id=attack))
    outputs.write_step(replace(record, draws=(named.draw,)), [named])
    outputs.finish()
    page = _parse((tmp_path / "report.html").read_text())
    assert not {tag for tag, _ in page.tags} & {"script", "img"}


def test_the_policy_allows_the_pages_own_style_and_nothing_else(report: str) -> None:
    style = re.search(r"<style>(.*?)</style>", report, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = _parse(report).policy
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_page_loads_nothing_and_has_no_inline_style(report: str) -> None:
    for tag, attrs in _parse(report).tags:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href", "style", "srcset"} & set(attrs), tag
    assert "url(" not in report
    assert "@import" not in report


def test_every_picture_is_well_formed_and_says_what_it_shows(report: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", report, re.DOTALL)
    assert len(pictures) == 18
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert "nan" not in picture


def test_the_page_has_its_parts(report: str) -> None:
    for words in (
        "Held-out, before and after",
        "Timeline of the steps",
        "Response length by kind of round",
        "Long-prompt queue",
        "Length bias",
        "Sample responses",
        "Settings of the run",
        "0.200 → 0.600",
    ):
        assert words in report
    assert report.count("<tr>") >= 12


def _only(metrics: Mapping[str, float], record: StepRecord) -> StepRecord:
    return replace(record, metrics=metrics)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"reward/mean": 0.0},
        {"response_length/max": 5.0},
        {"perf/waste": 1.0, "bias/ratio": 1.0},
        {"tail/queue_length": 0.0, "trainer/loss": -1e-9, "trainer/grad_norm": 1e12},
    ],
)
def test_missing_metrics_break_nothing(tmp_path: Path, metrics: Mapping[str, float]) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", {})
    for record, groups in ExampleRun(seed=6).steps(2):
        outputs.write_step(_only(metrics, record), groups)
    outputs.finish()
    _parse((tmp_path / "report.html").read_text())


def test_missing_samples_and_timings_break_nothing(tmp_path: Path) -> None:
    _write(tmp_path, steps=3)
    for path in (tmp_path / "samples").iterdir():
        path.unlink()
    RunOutputs(tmp_path, RUN_ID, "exact", {}).finish()
    page = (tmp_path / "report.html").read_text()
    _parse(page)
    assert "Sample responses" not in page


def test_a_step_of_empty_responses_breaks_nothing(tmp_path: Path) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", {})
    record, groups = next(ExampleRun(seed=6).steps(1))
    empty = [
        replace(
            group,
            responses=tuple(
                replace(
                    one,
                    response=replace(one.response, token_ids=(), logprobs=()),
                    reward=None,
                    verdict=None,
                    timing=None,
                )
                for one in group.responses
            ),
        )
        for group in groups
    ]
    outputs.write_step(
        replace(record, metrics={"response_length/p50": 0.0, "response_length/max": 0.0}), empty
    )
    summary = outputs.finish()
    assert summary["response_tokens"]["max"] == 0
    assert "NOT SCORED" in (tmp_path / "report.html").read_text()


def test_a_group_without_a_response_breaks_nothing(tmp_path: Path) -> None:
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", {})
    draw = Draw(0, "p", ())
    record = StepRecord(0, RoundKind.DRAIN, 0, 10.0, 10.0, 10.0, 1, (draw,))
    outputs.write_step(record, [PromptGroup(RUN_ID, 0, draw, (1,), (), 0, 0)])
    assert outputs.finish()["response_tokens"]["max"] is None
    _parse((tmp_path / "report.html").read_text())


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    played = list(ExampleRun(seed=6, prompts=1, responses=1).steps(1300))
    lines = LineFile(tmp_path / "metrics.jsonl")
    lines.replace(step_line_to_json(step_line(record)) for record, _ in played[:-1])
    outputs = RunOutputs(tmp_path, RUN_ID, "exact", {})
    outputs.write_step(*played[-1])
    outputs.finish()
    page = (tmp_path / "report.html").read_text()
    _parse(page)
    assert len(page) < 1_500_000
    assert "The first and the last 200 of 1,300 steps are shown." in page
    assert "The first 300 steps are left out; metrics.jsonl has them." in page


def test_a_comparison_is_part_of_the_page(tmp_path: Path) -> None:
    _write(tmp_path / "run")
    _write(tmp_path / "baseline")
    write_comparison(tmp_path / "run", tmp_path / "baseline")
    page = (tmp_path / "run" / "report.html").read_text()
    _parse(page)
    assert "Against example" in page
    assert "Ratios are run / baseline." in page
    RunOutputs(tmp_path / "run", RUN_ID, "exact", {}).finish()
    assert "Against example" in (tmp_path / "run" / "report.html").read_text()


def test_control_characters_are_made_visible() -> None:
    shown = visible("a\u202eb\x00c\x1b[0m\ud800\tend\n")
    assert shown == "a\ufffdb\ufffdc\ufffd[0m\ufffd\tend\n"


def test_a_long_text_keeps_its_head_and_tail() -> None:
    text = "h" * 900 + "m" * 1500 + "t" * 300
    assert shortened(text) == "h" * 900 + "\n… 1,500 characters left out …\n" + "t" * 300
    assert shortened("x" * 1200) == "x" * 1200
