"""The picture of one round: every trained response in its engine slot, and the bubbles between.

A row is a slot; replicas stand one above the other. What is blank while the round lasts is a
bubble, or the place of a response that was deferred: those are not in the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from services.coordinator.outputs import svg
from services.coordinator.outputs.formatting import format_number
from services.coordinator.outputs.lines import StepLine
from services.coordinator.outputs.phases import TRAIN_WAIT, Span, phase_spans
from services.coordinator.outputs.samples import ResponseRow
from services.coordinator.outputs.svg import Scale
from services.coordinator.outputs.trace import slot_rows

_MOST_ROWS = 256
_LEFT, _TOP, _BOTTOM = 110.0, 8.0, 28.0
_HEIGHTS = (2.0, 12.0)  # of a row: least and most
_WANTED_HEIGHT = 320.0  # of all rows


def slot_chart(line: StepLine, responses: Sequence[ResponseRow], width: float = 1100) -> Markup:
    """The round of a step; empty markup when no response has a time."""
    slots: dict[tuple[str, int], list[Span]] = {}
    for row in responses:
        if row.timing is not None:
            slots.setdefault((row.timing.replica_id, row.timing.slot), []).append(_span(row))
    rows = [(key[0], spans) for key in sorted(slots) for spans in slot_rows(slots[key])[:1]]
    if not rows:
        return Markup("")
    shown = rows[:_MOST_ROWS]
    pitch = min(_HEIGHTS[1], max(_HEIGHTS[0], _WANTED_HEIGHT / len(shown)))
    bottom = _TOP + pitch * len(shown)
    x = Scale(0.0, max(1e-3, line.end_time - line.start_time), _LEFT, width - 10)
    parts = [*_phases(line, x, bottom), *_labels([replica for replica, _ in shown], pitch)]
    for number, (_, spans) in enumerate(shown):
        top = _TOP + pitch * number
        parts += [_bar(span, line.start_time, x, top, pitch) for span in spans]
    left_out = f", {len(rows) - len(shown)} more slots left out" if len(rows) > len(shown) else ""
    label = f"Step {line.step}: {len(responses)} responses in {len(rows)} slots{left_out}"
    axis = svg.x_axis(x, bottom, "seconds")
    return svg.drawing(width, bottom + _BOTTOM, label, *parts, axis)


def _span(row: ResponseRow) -> Span:
    assert row.timing is not None
    words = (
        f"{row.epoch}:{row.prompt_id} #{row.index}: {row.token_count:,} tokens,"
        f" reward {format_number(row.reward)}, {row.verdict or 'not scored'}"
    )
    arguments = {"words": words, "css": _css(row)}
    return Span(words, row.timing.start_time, row.timing.end_time, arguments)


def _css(row: ResponseRow) -> str:
    if row.reward is None:
        return "other"
    return "right" if row.reward > 0 else "wrong"


def _bar(span: Span, origin: float, x: Scale, top: float, pitch: float) -> Markup:
    start, end = x(max(0.0, span.start - origin)), x(max(0.0, span.end - origin))
    words = f"{span.arguments['words']}, {span.end - span.start:.2f} s"
    height = max(1.0, pitch - 1.0)
    box = svg.rectangle(start, top, max(1.0, end - start - 0.5), height, span.arguments["css"])
    return svg.titled(words, box)


def _phases(line: StepLine, x: Scale, bottom: float) -> list[Markup]:
    """The wait for training as a band behind the rows."""
    return [
        svg.titled(
            f"{span.name}: {span.end - span.start:.2f} s",
            svg.rectangle(
                x(span.start - line.start_time),
                _TOP,
                x(span.end - line.start_time) - x(span.start - line.start_time),
                bottom - _TOP,
                "band",
            ),
        )
        for span in phase_spans(line)
        if span.name == TRAIN_WAIT
    ]


def _labels(replicas: Sequence[str], pitch: float) -> list[Markup]:
    """The name of each replica beside its first row."""
    return [
        svg.text((_LEFT - 8, _TOP + pitch * at + 10), name, "label", "end")
        for at, name in enumerate(replicas)
        if at == 0 or replicas[at - 1] != name
    ]
