"""trace.json: where the time went, in the Chrome trace event format that Perfetto opens.

Processes and rows:
- `coordinator`: the steps, and below them their phases (apply weights, round, train wait, commit);
- `trainer`: accumulate, update, checkpoint, publish, as far as the step reports them;
- `reward`: a span per scored response, on as many rows as were in flight at once;
- one process per replica, with a row per engine slot and a span per trained response.

Invariants: spans of one row never overlap; times are microseconds >= 0 since the first kept step.
A response is asked for before its slot is free, so its span begins when the row's last one ended.
Responses that were deferred or dropped are not in the samples: their slots look idle in a round.

The file is bounded: beyond MAX_SPANS only the first and the last steps are kept, whole, and
`otherData` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from services.coordinator.outputs.lines import StepLine
from services.coordinator.outputs.loaded_run import LoadedRun
from services.coordinator.outputs.phases import TRAIN_WAIT, Span, phase_spans
from services.coordinator.outputs.samples import ResponseRow

MAX_SPANS = 200_000
_COORDINATOR, _TRAINER, _REWARD, _FIRST_REPLICA = 1, 2, 3, 4  # process ids
_TRAINER_SPANS = ("accumulate", "update", "checkpoint", "publish")
_Event = dict[str, Any]


def build_trace(run: LoadedRun, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """The content of trace.json. max_spans: bound on the number of spans, roughly."""
    kept = kept_steps(run, max_spans)
    origin = kept[0].start_time if kept else 0.0
    rows = [row for line in kept for row in run.responses(line.step)]
    writer = _Writer(origin)
    _add_coordinator(writer, kept)
    _add_trainer(writer, kept)
    _add_rewards(writer, rows)
    _add_replicas(writer, rows)
    other = {
        "run_id": run.run_id,
        "mode": run.mode,
        "origin_seconds_since_epoch": origin,
        "steps": len(run.steps),
        "kept_steps": [line.step for line in kept],
        "note": _note(run, kept),
    }
    return {"traceEvents": writer.events, "displayTimeUnit": "ms", "otherData": other}


def kept_steps(run: LoadedRun, max_spans: int) -> list[StepLine]:
    """All steps if they fit, else as many of the first and of the last as fit, at least two."""
    sizes = [_span_count(run, line) for line in run.steps]
    if sum(sizes) <= max_spans:
        return list(run.steps)
    first, last, room = 0, len(sizes), max_spans
    while first < last:
        take_first = first <= len(sizes) - last
        size = sizes[first] if take_first else sizes[last - 1]
        if size > room and first + len(sizes) - last >= 2:
            break
        room -= size
        first, last = (first + 1, last) if take_first else (first, last - 1)
    return list(run.steps[:first] + run.steps[last:])


def _span_count(run: LoadedRun, line: StepLine) -> int:
    responses = run.verdicts[line.step].total() if line.step in run.verdicts else 0
    return 2 * responses + 8  # decoded and scored


def _note(run: LoadedRun, kept: Sequence[StepLine]) -> str:
    left_out = len(run.steps) - len(kept)
    note = "Deferred and dropped responses are not shown: their slots look idle in a round."
    if left_out:
        note += f" {left_out} steps in the middle are left out to bound the file."
    return note


class _Writer:
    """Collects events; knows the origin of time."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self.events: list[_Event] = []

    def process(self, process: int, name: str) -> None:
        self._name("process_name", process, 0, {"name": name})
        self._name("process_sort_index", process, 0, {"sort_index": process})

    def row(self, process: int, row: int, name: str, spans: Iterable[Span]) -> None:
        """One row; spans must be in order and must not overlap."""
        self._name("thread_name", process, row, {"name": name})
        self._name("thread_sort_index", process, row, {"sort_index": row})
        end = 0
        for span in spans:
            start = max(end, self._microseconds(span.start))
            end = max(start, self._microseconds(span.end))
            self.events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    "pid": process,
                    "tid": row,
                    "ts": start,
                    "dur": end - start,
                    "args": span.arguments,
                }
            )

    def _name(self, kind: str, process: int, row: int, arguments: dict[str, Any]) -> None:
        self.events.append({"name": kind, "ph": "M", "pid": process, "tid": row, "args": arguments})

    def _microseconds(self, time: float) -> int:
        return max(0, round((time - self._origin) * 1e6))


def _add_coordinator(writer: _Writer, lines: Sequence[StepLine]) -> None:
    writer.process(_COORDINATOR, "coordinator")
    writer.row(_COORDINATOR, 1, "steps", [_step_span(line) for line in lines])
    phases = [span for line in lines for span in phase_spans(line)]
    writer.row(_COORDINATOR, 2, "phases", phases)


def _step_span(line: StepLine) -> Span:
    arguments = {"round_kind": line.round_kind, "level": line.level, **line.metrics}
    return Span(f"step {line.step}", line.start_time, line.end_time, arguments)


def _add_trainer(writer: _Writer, lines: Sequence[StepLine]) -> None:
    """Rows from `trainer/{accumulate,update,checkpoint,publish}_seconds`, where reported.

    They follow each other and end with the coordinator's wait. Accumulation is interrupted by
    waiting for groups; its span has the length of the work. Without these metrics the wait stands
    for the update.
    """
    writer.process(_TRAINER, "trainer")
    spans = [trainer_spans(line) for line in lines]
    for row, name in enumerate(_TRAINER_SPANS, start=1):
        writer.row(_TRAINER, row, name, [each[name] for each in spans if name in each])


def trainer_spans(line: StepLine) -> dict[str, Span]:
    """The trainer's work in a step, by name."""
    waits = [span for span in phase_spans(line) if span.name == TRAIN_WAIT]
    end = waits[0].end if waits else line.end_time
    spans: dict[str, Span] = {}
    for name in reversed(_TRAINER_SPANS):
        seconds = line.metric(f"trainer/{name}_seconds")
        if seconds:
            start = max(line.start_time, end - seconds)
            spans[name] = Span(f"{name} {line.step}", start, end)
            end = start
    if not spans and waits:
        spans["update"] = Span(f"finish step {line.step}", waits[0].start, waits[0].end)
    return spans


def _add_rewards(writer: _Writer, rows: Iterable[ResponseRow]) -> None:
    writer.process(_REWARD, "reward")
    spans = [_reward_span(row) for row in rows if row.score_time > row.score_start_time > 0]
    for number, lane in enumerate(lanes(spans), start=1):
        writer.row(_REWARD, number, f"scoring {number}", lane)


def _reward_span(row: ResponseRow) -> Span:
    arguments = {"step": row.step, "reward": row.reward, "verdict": row.verdict}
    return Span(_response_name(row), row.score_start_time, row.score_time, arguments)


def _add_replicas(writer: _Writer, rows: Iterable[ResponseRow]) -> None:
    slots: dict[tuple[str, int], list[Span]] = {}
    for row in rows:
        if row.timing is not None:
            slots.setdefault((row.timing.replica_id, row.timing.slot), []).append(_decode_span(row))
    replicas = sorted({replica for replica, _ in slots})
    for process, replica in enumerate(replicas, start=_FIRST_REPLICA):
        writer.process(process, replica)
        number = 0
        for slot in sorted(slot for owner, slot in slots if owner == replica):
            for extra, lane in enumerate(slot_rows(slots[replica, slot])):
                number += 1
                name = f"slot {slot}" if extra == 0 else f"slot {slot}, moved in"
                writer.row(process, number, name, lane)


def slot_rows(spans: Sequence[Span]) -> list[list[Span]]:
    """A slot's spans, each begun when the one before ended; what lies inside others goes apart.

    A response that moved to the slot may have started long before it got there.
    """
    row: list[Span] = []
    inside: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.end, span.start)):
        start = max(span.start, row[-1].end) if row else span.start
        if start < span.end or span.start == span.end:
            row.append(Span(span.name, start, span.end, span.arguments))
        else:
            inside.append(span)
    return [row, *lanes(inside)]


def _decode_span(row: ResponseRow) -> Span:
    assert row.timing is not None
    arguments = {
        "step": row.step,
        "tokens": row.token_count,
        "seed": str(row.seed),  # beyond 2^53: a number would be rounded by readers
        "level": row.level,
        "verdict": row.verdict,
        "reward": row.reward,
        "finish_reason": row.finish_reason,
    }
    return Span(_response_name(row), row.timing.start_time, row.timing.end_time, arguments)


def _response_name(row: ResponseRow) -> str:
    return f"{row.epoch}:{row.prompt_id} #{row.index}"


def lanes(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spread spans over as few rows as keep them from overlapping."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return iter(rows)
