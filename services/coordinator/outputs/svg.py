"""SVG by small pure functions: elements, scales, axes. No chart is drawn here.

Every attribute and every piece of text is escaped on its way in (`Markup` marks what already is).
Colours are CSS classes of the report's template, so that light and dark share one drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from services.coordinator.outputs.formatting import format_tick

Point = tuple[float, float]


def element(name: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """An element; `class_` gives class, `text_anchor` gives text-anchor; None leaves one out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    content = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, content)


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"


def drawing(width: float, height: float, label: str, *children: Markup) -> Markup:
    """A whole picture; label says for screen readers what it shows."""
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _attribute(width), _attribute(height), label, Markup("").join(children)
    )


def line(start: Point, end: Point, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=class_)


def path(points: Sequence[Point], class_: str) -> Markup:
    """A line through points."""
    if not points:
        return Markup("")
    d = "M" + "L".join(f"{_attribute(x)} {_attribute(y)}" for x, y in points)
    return element("path", d=d, class_=class_)


def text(place: Point, content: str, class_: str = "label", anchor: str = "start") -> Markup:
    """Words; the place is the baseline."""
    return element("text", content, x=place[0], y=place[1], class_=class_, text_anchor=anchor)


def rectangle(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """A box, from its top left corner."""
    return element("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def titled(title: str, *children: Markup) -> Markup:
    """A group with a tooltip."""
    return element("g", element("title", title), *children)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels, linearly or by their logarithm (then values are above 0)."""

    low: float
    high: float
    start: float  # pixel of low
    end: float  # pixel of high
    log: bool = False
    spaces: int = 5  # between ticks, about

    def __call__(self, value: float) -> float:
        low, high = self._position(self.low), self._position(self.high)
        share = (self._position(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def _position(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.log else value

    def ticks(self) -> list[float]:
        """Round values within the domain."""
        if self.log:
            values = _log_ticks(self.low, self.high)
        else:
            values = nice(self.low, self.high, self.spaces)
        slack = 1e-9 * (self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def value_scale(
    values: Iterable[float], start: float, end: float, zero: bool = True, spaces: int = 4
) -> Scale:
    """A linear scale with room for all values, from round to round; from 0 if asked for."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12:
        low, high = low - 0.5 * (not zero), high + 0.5 + 0.5 * zero
    ticks = nice(low, high, spaces)
    return Scale(ticks[0], ticks[-1], start, end, spaces=len(ticks) - 1)


def nice(low: float, high: float, count: int) -> list[float]:
    """Round values 1, 2, 2.5 or 5 times a power of ten apart, from below low to above high."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two when they are few, else powers of ten."""
    base = 2.0 if high / low <= 2**8 else 10.0
    if base == 2.0 and high / low > 2**5:
        base = 4.0
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [base**power for power in range(first, last + 1)]


def y_axis(scale: Scale, left: float, right: float, unit: str = "") -> Markup:
    """Grid lines with their values at the left."""
    return Markup("").join(
        line((left, scale(tick)), (right, scale(tick)), "grid")
        + text((left - 8, scale(tick) + 4), f"{format_tick(tick)}{unit}", "tick", "end")
        for tick in scale.ticks()
    )


def x_axis(scale: Scale, bottom: float, title: str = "") -> Markup:
    """The base line with values below it; the title stands at its right end."""
    marks = Markup("").join(
        text((scale(tick), bottom + 17), format_tick(tick), "tick", "middle")
        for tick in scale.ticks()
        if not title or scale(tick) < scale.end - 7 * len(title) - 12
    )
    base = line((scale.start, bottom), (scale.end, bottom), "axis")
    return base + marks + text((scale.end, bottom + 17), title, "tick", "end")


def bucket_means(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: each the mean of equally many neighbours."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        for bucket in buckets
    ]
