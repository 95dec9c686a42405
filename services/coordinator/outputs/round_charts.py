"""The pictures of rounds: the timeline of steps, response lengths by kind of round.

Colour is the kind of round and its level, the same in every picture; tooltips say it in words.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from services.coordinator.outputs import svg
from services.coordinator.outputs.charts import round_css
from services.coordinator.outputs.formatting import format_number, format_score
from services.coordinator.outputs.lines import StepLine
from services.coordinator.outputs.loaded_run import (
    LoadedRun,
    RoundClass,
    percentile,
    round_class,
)
from services.coordinator.outputs.phases import ROUND, TRAIN_WAIT, phase_spans
from services.coordinator.outputs.svg import Scale

STRIP_STEPS = 100  # steps in one strip of the timeline
MAX_STRIPS = 4
_MAX_WHISKERS = 300


def timeline_steps(run: LoadedRun) -> list[list[StepLine]]:
    """The strips of the timeline; of a long run the first and the last ones."""
    size = STRIP_STEPS
    if STRIP_STEPS < len(run.steps) <= STRIP_STEPS * MAX_STRIPS:
        size = math.ceil(len(run.steps) / math.ceil(len(run.steps) / STRIP_STEPS))
    strips = [list(run.steps[at : at + size]) for at in range(0, len(run.steps), size)]
    if len(strips) <= MAX_STRIPS:
        return strips
    half = MAX_STRIPS // 2
    return strips[:half] + strips[-half:]


def timeline_chart(run: LoadedRun, width: float = 1100) -> Markup:
    """A bar per step: its phases in seconds, the round in the colour of its kind."""
    strips = timeline_steps(run)
    if not strips:
        return Markup("")
    strip_height, gap = 150.0, 34.0
    longest = max(line.end_time - line.start_time for strip in strips for line in strip)
    size = max(len(strip) for strip in strips)
    parts = []
    for number, strip in enumerate(strips):
        top = 10 + number * (strip_height + gap)
        y = svg.value_scale([longest], top + strip_height, top, spaces=3)
        parts.append(_strip(strip, size, y, width))
    height = 10 + len(strips) * (strip_height + gap) - gap + 22
    label = f"Time of {len(run.steps)} steps by phase, longest {longest:.1f} s"
    return svg.drawing(width, height, label, *parts)


def _strip(strip: Sequence[StepLine], size: int, y: Scale, width: float) -> Markup:
    left = 44.0
    pitch = min(30.0, (width - left - 8) / size)
    x = Scale(0, 1, left + 6, left + 6 + pitch)
    bars = [_step_bar(line, x(index), pitch * 0.84, y) for index, line in enumerate(strip)]
    every = math.ceil(46 / pitch)
    ticks = [
        svg.text((x(index) + pitch * 0.42, y.start + 17), str(line.step), "tick", "middle")
        for index, line in enumerate(strip)
        if index % every == 0
    ]
    grid = svg.y_axis(y, left, width, " s")
    base = svg.line((left, y.start), (width, y.start), "axis")
    return grid + Markup("").join([*bars, base, *ticks])


def _step_bar(line: StepLine, x: float, width: float, y: Scale) -> Markup:
    """Phases from the bottom up, in the order of time."""
    kind = round_class(line)
    boxes, words = [], [f"step {line.step}, {kind.label}: {line.seconds:.2f} s"]
    for span in phase_spans(line):
        low, high = y(span.start - line.start_time), y(span.end - line.start_time)
        css = {ROUND: round_css(kind), TRAIN_WAIT: "training"}.get(span.name, "commit")
        boxes.append(svg.rectangle(x, high, width, low - high, css))
        words.append(f"{span.name} {span.end - span.start:.2f} s")
    reward = line.metric("reward/mean")
    if reward is not None:
        words.append(f"reward {format_score(reward)}")
    return svg.titled("\n".join(words), *boxes)


def length_edges(low: int, high: int) -> list[int]:
    """Edges of bins that hold low to high: each about 1.4 times the one before, whole tokens."""
    powers = (round(2 ** (half / 2)) for half in itertools.count())
    edges = [0]
    for edge in powers:
        if edge > edges[-1]:
            edges.append(edge)
        if edge > high:
            break
    first = max(index for index, edge in enumerate(edges) if edge <= max(0, low))
    return edges[first:]


def binned_shares(counts: Counter[int], edges: Sequence[int]) -> list[float]:
    """The share of values in [edge, next edge), for each bin."""
    total = counts.total()
    return [
        sum(count for value, count in counts.items() if low <= value < high) / total
        for low, high in itertools.pairwise(edges)
    ]


def length_histogram(run: LoadedRun, width: float = 540) -> Markup:
    """A histogram per kind of round, one above the other over the same bins."""
    if not run.lengths:
        return Markup("")
    everything = run.all_lengths
    edges = length_edges(min(everything), max(everything))
    shares = {kind: binned_shares(counts, edges) for kind, counts in run.lengths.items()}
    highest = max(max(row) for row in shares.values())
    bar, left = {1: 190.0, 2: 100.0}.get(len(shares), 56.0), 6.0
    pitch = bar + 34
    x = Scale(0, len(edges) - 1, left, width - 6)
    rows = [
        _histogram_row(kind, run.lengths[kind], row, x, Scale(0, highest, base, base - bar))
        for number, (kind, row) in enumerate(shares.items())
        for base in [pitch * (number + 1) - 4]
    ]
    bottom = pitch * len(rows) - 4
    label = f"Lengths of {everything.total()} trained responses by kind of round"
    return svg.drawing(width, bottom + 24, label, *rows, _edge_ticks(edges, x, bottom))


def _histogram_row(
    kind: RoundClass, counts: Counter[int], shares: Sequence[float], x: Scale, y: Scale
) -> Markup:
    bars = [
        svg.titled(
            f"{kind.label}: {share:.1%}",
            svg.rectangle(
                x(at) + 1, y(share), x(1) - x(0) - 2, y.start - y(share), round_css(kind)
            ),
        )
        for at, share in enumerate(shares)
        if share > 0
    ]
    median, high, longest = percentile(counts, 0.5), percentile(counts, 0.99), max(counts)
    figures = f"{counts.total():,} responses · p50 {median:,} · p99 {high:,} · max {longest:,}"
    top = y.end - 12
    words = svg.text((x.start, top), kind.label, "label strong")
    words += svg.text((x.end, top), figures, "tick", "end")
    base = svg.line((x.start, y.start), (x.end, y.start), "axis")
    return words + Markup("").join([*bars, base])


def _edge_ticks(edges: Sequence[int], x: Scale, bottom: float) -> Markup:
    """The powers of two below the last row, as many as have room; the unit at the end."""
    powers = [(at, edge) for at, edge in enumerate(edges) if edge & (edge - 1) == 0]
    every = math.ceil(44 * len(powers) / (x.end - x.start))
    ticks = [
        svg.text((x(at), bottom + 17), f"{edge:,}", "tick", "start" if at == 0 else "middle")
        for at, edge in powers[::every]
        if x(at) < x.end - 60
    ]
    return Markup("").join(ticks) + svg.text((x.end, bottom + 17), "tokens", "tick", "end")


def length_chart(run: LoadedRun, width: float = 540, height: float = 290) -> Markup:
    """A whisker per step from the median to the longest response, with a tick at P99."""
    stride = math.ceil(len(run.steps) / _MAX_WHISKERS) or 1
    shown = [line for line in run.steps[::stride] if line.metric("response_length/max")]
    if not shown:
        return Markup("")
    left, bottom = 52.0, height - 28
    lows = [line.metrics.get("response_length/p50", 1.0) for line in shown]
    highs = [line.metrics["response_length/max"] for line in shown]
    low = max(1.0, 2.0 ** math.floor(math.log2(max(1.0, min(lows)))))
    high = max(2.0 * low, 2.0 ** math.ceil(math.log2(max(highs))))
    x = Scale(0, max(1, run.steps[-1].step), left + 6, width - 8)
    y = Scale(low, high, bottom, 10, log=True)
    return svg.drawing(
        width,
        height,
        f"Response lengths of {len(shown)} steps: median to longest",
        svg.y_axis(y, left, width),
        svg.x_axis(x, bottom, "step"),
        *(_whisker(line, x(line.step), y, "thin" if len(shown) > 120 else "") for line in shown),
    )


def _whisker(line: StepLine, x: float, y: Scale, weight: str) -> Markup:
    css = f"{round_css(round_class(line))} {weight}".strip()
    longest = line.metrics["response_length/max"]
    median, high = line.metric("response_length/p50"), line.metric("response_length/p99")
    marks = []
    if median is not None:
        marks.append(svg.line((x, y(median)), (x, y(longest)), f"stem {css}"))
        marks.append(
            svg.element("circle", cx=x, cy=y(median), r=1.4 if weight else 2.2, class_=f"dot {css}")
        )
    if high is not None:
        marks.append(svg.line((x - 2.5, y(high)), (x + 2.5, y(high)), f"stem {css}"))
    title = (
        f"step {line.step}, {round_class(line).label}: p50 {format_number(median)},"
        f" p99 {format_number(high)}, max {format_number(longest)} tokens"
    )
    return svg.titled(title, *marks)
