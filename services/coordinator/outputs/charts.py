"""The pictures over steps: reward with held-out marks, before and after, small curves.

Each function takes a run and returns an SVG, or empty markup when the run has nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from services.coordinator.outputs import svg
from services.coordinator.outputs.formatting import format_number, format_score
from services.coordinator.outputs.lines import ValidationLine
from services.coordinator.outputs.loaded_run import LoadedRun, RoundClass, round_class
from services.coordinator.outputs.svg import Point, Scale

_REWARD = "reward/mean"
_MAX_DOTS = 1500
_MAX_LINE_POINTS = 400
_MAX_LABELLED_MARKS = 8
_Z95 = 1.96  # standard deviations on each side that hold 95 %


def round_css(kind: RoundClass) -> str:
    """CSS class with the colour of a kind of round."""
    if kind.kind == "short":
        return f"short-{min(kind.level, 3)}"
    return kind.kind if kind.kind in ("long", "drain") else "other"


def smoothing_window(step_count: int) -> int:
    """Steps in the moving mean of the reward chart; odd."""
    return max(3, step_count // 12) | 1


def reward_chart(run: LoadedRun, width: float = 720, height: float = 300) -> Markup:
    """Reward per step as dots, its moving mean as a line, held-out scores as diamonds."""
    points = [(line.step, line.metrics[_REWARD]) for line in run.steps if _REWARD in line.metrics]
    scores = [(line.step, line.score) for line in run.validations if line.score is not None]
    if not points and not scores:
        return Markup("")
    left, bottom = 44.0, height - 28
    last = max(x for x, _ in [*points, *scores])
    x = Scale(0, max(1, last), left + 8, width - 14)
    bounds = [end for line in run.validations for end in score_interval(line) or ()]
    y = svg.value_scale([*(value for _, value in [*points, *scores]), *bounds], bottom, 14)
    placed = [(x(step), y(value)) for step, value in points]
    means = svg.bucket_means(_moving_mean(placed, smoothing_window(len(placed))), _MAX_LINE_POINTS)
    return svg.drawing(
        width,
        height,
        f"Reward of {len(points)} steps and {len(scores)} held-out measurements",
        svg.y_axis(y, left, width),
        svg.x_axis(x, bottom, "optimizer updates"),
        _reward_dots(run, x, y),
        svg.path(means, "mean"),
        _validation_marks(run.validations, x, y),
    )


def _reward_dots(run: LoadedRun, x: Scale, y: Scale) -> Markup:
    stride = math.ceil(len(run.steps) / _MAX_DOTS) or 1
    dots = []
    for line in run.steps[::stride]:
        reward = line.metric(_REWARD)
        if reward is not None:
            kind = round_class(line)
            title = f"step {line.step} ({kind.label}): reward {format_score(reward)}"
            dot = svg.element(
                "circle", cx=x(line.step), cy=y(reward), r=2.8, class_=f"dot {round_css(kind)}"
            )
            dots.append(svg.titled(title, dot))
    return Markup("").join(dots)


def _moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of a centred window at each point; the window shrinks at both ends."""
    half = window // 2
    means = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        near = points[index - reach : index + reach + 1]
        means.append((x, sum(y for _, y in near) / len(near)))
    return means


def _validation_marks(lines: Sequence[ValidationLine], x: Scale, y: Scale) -> Markup:
    """One diamond per measurement; those of one set are joined."""
    marks = Markup("")
    for name in dict.fromkeys(line.name for line in lines):
        found = [(line, line.score) for line in lines if line.name == name]
        scored = [(line, score) for line, score in found if score is not None]
        marks += svg.path([(x(line.step), y(score)) for line, score in scored], "held-out-line")
        ends = {0, len(scored) - 1}
        for index, (line, score) in enumerate(scored):
            place = (x(line.step), y(score))
            title = f"{name} after {line.step} updates: {format_score(score)}"
            marks += svg.titled(title, _interval(line, place[0], y), _diamond(place))
            if index in ends or len(scored) <= _MAX_LABELLED_MARKS:
                marks += _mark_label(place, score, x)
    return marks


def _diamond(place: Point, radius: float = 6.5) -> Markup:
    x, y = place
    corners = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
    return svg.element(
        "polygon", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners), class_="held-out"
    )


def _interval(line: ValidationLine, x: float, y: Scale) -> Markup:
    bounds = score_interval(line)
    if bounds is None:
        return Markup("")
    return svg.line((x, y(bounds[0])), (x, y(bounds[1])), "held-out-interval")


def _mark_label(place: Point, score: float, x: Scale) -> Markup:
    near_end = place[0] > x.end - 30
    offset, anchor = (-11, "end") if near_end else (11, "start")
    return svg.text((place[0] + offset, place[1] - 9), format_score(score), "mark halo", anchor)


def score_interval(line: ValidationLine) -> tuple[float, float] | None:
    """Wilson's 95 % interval of an accuracy, if `count` says how many responses it rests on."""
    count, share = line.values.get("count", 0.0), line.score
    if share is None or count < 1 or not 0 <= share <= 1:
        return None
    spread = _Z95**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def before_after_chart(run: LoadedRun, width: float = 340) -> Markup:
    """First and last held-out measurement of each set, as bars with their 95 % interval."""
    rows: list[tuple[str, ValidationLine, float]] = []
    names = list(dict.fromkeys(line.name for line in run.validations if line.score is not None))
    for name in names:
        scored = [line for line in run.validations if line.name == name and line.score is not None]
        for line in dict.fromkeys([0, len(scored) - 1]):
            measured = scored[line]
            rows.append((name, measured, measured.score or 0.0))
    if not rows:
        return Markup("")
    pitch, top = 66.0, 8.0
    height = top + pitch * len(rows) + 22
    ends = [bounds[1] for _, line, _ in rows if (bounds := score_interval(line))]
    x = svg.value_scale([score for _, _, score in rows] + ends, 2, width - 12)
    bars = Markup("").join(
        _score_bar(name, line, score, x, top + pitch * index)
        for index, (name, line, score) in enumerate(rows)
    )
    label = "; ".join(f"{name} after {line.step} updates {score:.3f}" for name, line, score in rows)
    axis = svg.x_axis(x, height - 22)
    return svg.drawing(width, height, f"Held-out scores: {label}", bars, axis)


def _score_bar(name: str, line: ValidationLine, score: float, x: Scale, top: float) -> Markup:
    when = "initial weights" if line.step == 0 else f"after {line.step} updates"
    middle = top + 40
    bar = svg.rectangle(
        x(0), middle - 11, x(score) - x(0), 22, "before" if line.step == 0 else "after"
    )
    words = svg.text((x(0), top + 20), f"{name.replace('_', '-')}, {when}", "label")
    figure = svg.text((x.end + 8, top + 20), format_score(score), "mark", "end")
    bounds = score_interval(line)
    if bounds is None:
        return words + figure + bar
    low, high = x(bounds[0]), x(bounds[1])
    whisker = svg.line((low, middle), (high, middle), "whisker") + Markup("").join(
        svg.line((end, middle - 4), (end, middle + 4), "whisker") for end in (low, high)
    )
    return (
        words
        + figure
        + svg.titled(f"95 % interval {bounds[0]:.3f} to {bounds[1]:.3f}", bar, whisker)
    )


def small_chart(
    run: LoadedRun, name: str, reference: float | None = None, width: float = 340
) -> Markup:
    """One metric over steps, with a dashed line at its reference."""
    points = [(line.step, line.metrics[name]) for line in run.steps if name in line.metrics]
    if not points:
        return Markup("")
    height, left = 132.0, 44.0
    bottom = height - 24
    values = [value for _, value in points] + ([] if reference is None else [reference])
    x = Scale(0, max(1, points[-1][0]), left + 4, width - 8)
    y = svg.value_scale(values, bottom, 10, zero=reference is None, spaces=3)
    curve = svg.bucket_means([(x(step), y(value)) for step, value in points], _MAX_LINE_POINTS)
    base = Markup("")
    if reference is not None:
        base = svg.line((left, y(reference)), (width, y(reference)), "reference")
    return svg.drawing(
        width,
        height,
        f"{name} over {len(points)} steps, last {format_number(points[-1][1])}",
        svg.y_axis(y, left, width),
        svg.x_axis(x, bottom),
        base,
        svg.path(curve, "curve"),
    )
