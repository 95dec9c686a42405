"""The picture of the long-prompt queue: how old the deferred draws are, by level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from markupsafe import Markup

from services.coordinator.outputs import svg
from services.coordinator.outputs.svg import Scale


def queue_chart(counts: Mapping[tuple[int, int], int], width: float = 540) -> Markup:
    """Draws by age in steps, their levels stacked; counts: (level, age) -> draws."""
    if not counts:
        return Markup("")
    height, left = 190.0, 44.0
    bottom = height - 28
    totals: Counter[int] = Counter()
    for (_, age), count in counts.items():
        totals[age] += count
    ages = range(max(totals) + 1)
    x = Scale(0, len(ages), left + 4, width - 8)
    y = svg.value_scale([float(max(totals.values()))], bottom, 10, spaces=3)
    parts = []
    for age in ages:
        below = 0
        for level in sorted({level for level, at in counts if at == age}):
            count = counts[level, age]
            top, base = y(below + count), y(below)
            box = svg.rectangle(
                x(age) + 1, top, x(1) - x(0) - 2, base - top, f"short-{min(level, 3)}"
            )
            parts.append(svg.titled(f"level {level}, {age} steps old: {count} draws", box))
            below += count
    label = f"{sum(totals.values())} deferred draws by age"
    axis = svg.x_axis(x, bottom, "steps since the first launch")
    return svg.drawing(width, height, label, svg.y_axis(y, left, width), axis, *parts)
