"""Samples: what is read equals what was written, and the fast scan sees the same responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs_example_run import ExampleRun

from rollpacker.types import (
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    ResponseTiming,
    ScoredResponse,
    Segment,
    Verdict,
)
from services.coordinator.outputs.run_directory import RunDirectoryError
from services.coordinator.outputs.samples import group_to_lines, read_groups, scan

_TIMES = st.floats(0, 2e9)
_SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def _scored(draw: st.DrawFn, index: int) -> ScoredResponse:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
    logprobs = st.lists(st.floats(-1e4, 0), min_size=len(tokens), max_size=len(tokens))
    timing = st.builds(ResponseTiming, _TIMES, _TIMES, st.integers(0, 99), st.text())
    return ScoredResponse(
        response=Response(
            response_id=draw(st.text()),
            index=index,
            token_ids=tuple(tokens),
            logprobs=tuple(draw(logprobs)),
            finish_reason=draw(st.sampled_from(FinishReason)),
            weight_version=draw(st.integers(0, 99)),
            seed=draw(_SEEDS),
            segments=(Segment("tool", 0, False), Segment("assistant", len(tokens), True)),
            carried_token_count=draw(st.integers(0, 9)),
            near_tie_count=draw(st.integers(0, 9)),
            accepted_draft_token_count=draw(st.integers(0, 9)),
        ),
        reward=draw(st.none() | st.floats(-1, 1)),
        advantage=draw(st.floats(-9, 9)),
        verdict=draw(st.none() | st.sampled_from(Verdict)),
        text=draw(st.text(st.characters())),
        timing=draw(st.none() | timing),
        score_start_time=draw(_TIMES),
        score_time=draw(_TIMES),
    )


@st.composite
def _group(draw: st.DrawFn, number: int) -> PromptGroup:
    count = draw(st.integers(0, 3))
    seeds = tuple(draw(_SEEDS) for _ in range(count))
    return PromptGroup(
        run_id=draw(st.text()),
        step=5,
        draw=Draw(draw(st.integers(0, 3)), f"{draw(st.text())}{number}", seeds, level=1),
        prompt_token_ids=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
        responses=tuple(draw(_scored(index)) for index in range(count)),
        weight_version=draw(st.integers(0, 99)),
        race_key=draw(st.integers(0, 99)),
    )


@settings(deadline=None)  # writes files
@given(data=st.data())
def test_groups_read_equal_the_groups_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    groups = [data.draw(_group(number)) for number in range(data.draw(st.integers(0, 3)))]
    path = tmp_path_factory.mktemp("samples") / "step.jsonl"
    path.write_text("".join(line + "\n" for group in groups for line in group_to_lines(group)))
    assert read_groups(path) == groups


def _write(path: Path, groups: list[PromptGroup]) -> None:
    path.write_text("".join(line + "\n" for group in groups for line in group_to_lines(group)))


def test_the_scan_sees_every_response_and_its_light_fields(tmp_path: Path) -> None:
    [(_, groups)] = ExampleRun(seed=3).steps(1)
    path = tmp_path / "step.jsonl"
    _write(path, groups)
    expected = [
        (group.draw.prompt_id, one.response.index, len(one.response.token_ids), one.reward)
        for group in groups
        for one in group.responses
    ]
    rows = list(scan(path))
    assert [(row.prompt_id, row.index, row.token_count, row.reward) for row in rows] == expected
    assert rows[0].timing == groups[0].responses[0].timing


def test_text_that_looks_like_a_key_does_not_fool_the_scan(tmp_path: Path) -> None:
    [(_, groups)] = ExampleRun(seed=3).steps(1)
    traps = [',"text":', '","text":"', '\\","text":', '{"index":null}', '\n,"text":\n']
    one = groups[0].responses[0]
    trapped = [
        replace(
            groups[0],
            draw=replace(groups[0].draw, prompt_id=trap),
            responses=(replace(one, text=trap),),
        )
        for trap in traps
    ]
    path = tmp_path / "step.jsonl"
    _write(path, trapped)
    assert [row.prompt_id for row in scan(path)] == traps
    assert read_groups(path) == trapped


def test_each_line_can_be_read_alone(tmp_path: Path) -> None:
    [(_, groups)] = ExampleRun(seed=3).steps(1)
    for line in group_to_lines(groups[0]):
        path = tmp_path / "one.jsonl"
        path.write_text(line + "\n")
        [group] = read_groups(path)
        assert (group.draw, group.prompt_token_ids) == (groups[0].draw, groups[0].prompt_token_ids)


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path) -> None:
    [(_, groups)] = ExampleRun(seed=3).steps(1)
    path = tmp_path / "step.jsonl"
    _write(path, groups)
    path.write_bytes(path.read_bytes() + b'{"run_id"\n')
    responses = sum(len(group.responses) for group in groups)
    for read in (read_groups, lambda path: list(scan(path))):
        with pytest.raises(RunDirectoryError, match=f"line {responses + 1}: not JSON"):
            read(path)
