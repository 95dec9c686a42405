"""trace.json: the structure that Perfetto needs, and the bound on its size."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs_example_run import RUN_ID, ExampleRun

from rollpacker.types import ResponseTiming
from services.coordinator.outputs import RunOutputs
from services.coordinator.outputs.loaded_run import LoadedRun, load_run
from services.coordinator.outputs.phases import Span
from services.coordinator.outputs.trace import build_trace, lanes

STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    directory = tmp_path_factory.mktemp("run")
    outputs = RunOutputs(directory, RUN_ID, "exact", {})
    for record, groups in ExampleRun(seed=4).steps(STEPS):
        outputs.write_step(record, groups)
    return load_run(directory)


def _spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == kind
    }


def _assert_valid(trace: dict[str, Any]) -> None:
    rows = defaultdict(list)
    named = _names(trace, "thread_name")
    processes = {process for process, _ in _names(trace, "process_name")}
    for span in _spans(json.loads(json.dumps(trace, allow_nan=False))):
        assert isinstance(span["ts"], int)
        assert span["ts"] >= 0
        assert isinstance(span["dur"], int)
        assert span["dur"] >= 0
        assert (span["pid"], span["tid"]) in named
        assert span["pid"] in processes
        rows[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for row, spans in rows.items():
        spans.sort()
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert start >= end, f"spans of {named[row]} overlap"


def test_rows_never_overlap_and_times_are_microseconds_from_zero(run: LoadedRun) -> None:
    _assert_valid(build_trace(run))


def test_every_response_has_a_span_in_its_slot_and_one_where_it_was_scored(run: LoadedRun) -> None:
    trace = build_trace(run)
    processes = {pid: name for (pid, _), name in _names(trace, "process_name").items()}
    rows = _names(trace, "thread_name")
    decoded, scored = Counter(), 0
    for span in _spans(trace):
        process = processes[span["pid"]]
        if process.startswith("rollout-"):
            decoded[process, rows[span["pid"], span["tid"]]] += 1
        scored += process == "reward"
    expected = Counter(
        (row.timing.replica_id, f"slot {row.timing.slot}")
        for line in run.steps
        for row in run.responses(line.step)
        if row.timing
    )
    assert decoded == expected
    assert scored == expected.total()


def test_a_span_tells_its_prompt_tokens_seed_level_and_verdict(run: LoadedRun) -> None:
    first = next(run.responses(0))
    name = f"{first.epoch}:{first.prompt_id} #{first.index}"
    span = next(s for s in _spans(build_trace(run)) if s["name"] == name and "tokens" in s["args"])
    assert span["args"] == {
        "step": 0,
        "tokens": first.token_count,
        "seed": str(first.seed),
        "level": 0,
        "verdict": first.verdict,
        "reward": first.reward,
        "finish_reason": "stop",
    }
    assert first.timing is not None
    duration = first.timing.end_time - first.timing.start_time
    assert span["dur"] == pytest.approx(duration * 1e6, abs=2)


def test_coordinator_and_trainer_have_their_rows(run: LoadedRun) -> None:
    trace = build_trace(run)
    rows = _names(trace, "thread_name")
    counts = Counter(rows[span["pid"], span["tid"]] for span in _spans(trace) if span["pid"] <= 2)
    assert counts == {
        "steps": STEPS,
        "phases": 4 * STEPS,
        "accumulate": STEPS,
        "update": STEPS,
        "checkpoint": STEPS,
        "publish": STEPS,
    }


def test_beyond_the_cap_the_first_and_last_steps_are_kept_whole(run: LoadedRun) -> None:
    trace = build_trace(run, max_spans=5 * 32)
    kept = trace["otherData"]["kept_steps"]
    assert kept == [0, 1, 2, 10, 11]
    assert "7 steps in the middle are left out" in trace["otherData"]["note"]
    assert len(_spans(trace)) <= 5 * 34
    _assert_valid(trace)


def test_two_steps_are_kept_however_small_the_cap(run: LoadedRun) -> None:
    assert build_trace(run, max_spans=1)["otherData"]["kept_steps"] == [0, STEPS - 1]


def test_a_run_without_a_step_has_an_empty_trace(tmp_path: Path) -> None:
    RunOutputs(tmp_path, RUN_ID, "exact", {})
    trace = build_trace(load_run(tmp_path))
    assert _spans(trace) == []


@settings(deadline=None)  # writes files
@given(data=st.data())
def test_any_times_and_slots_give_a_valid_trace(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Clocks of other hosts, moved responses, missing timings."""
    directory = tmp_path_factory.mktemp("run")
    outputs = RunOutputs(directory, RUN_ID, "exact", {})
    times = st.floats(1_789_999_990, 1_790_000_020)
    timings = st.none() | st.builds(
        ResponseTiming, times, times, st.integers(0, 1), st.sampled_from(["a", "b"])
    )
    for record, groups in ExampleRun(seed=5, prompts=2, responses=2).steps(2):
        shaken = [
            replace(
                group,
                responses=tuple(
                    replace(
                        one,
                        timing=data.draw(timings),
                        score_start_time=data.draw(times),
                        score_time=data.draw(times),
                    )
                    for one in group.responses
                ),
            )
            for group in groups
        ]
        outputs.write_step(record, shaken)
    _assert_valid(build_trace(load_run(directory)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10))))
def test_lanes_are_as_few_as_spans_that_run_at_once(items: list[tuple[int, int]]) -> None:
    spans = [Span("x", start, start + length) for start, length in items if length]
    rows = list(lanes(spans))
    assert sorted((s.start, s.end) for row in rows for s in row) == sorted(
        (s.start, s.end) for s in spans
    )
    at_once = max(
        (sum(other.start <= span.start < other.end for other in spans) for span in spans),
        default=0,
    )
    assert len(rows) == at_once
