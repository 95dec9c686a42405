"""Numbers as people read them. Missing ones are a dash."""

from __future__ import annotations

import datetime
import math

MISSING = "–"


def format_number(value: float | None, unit: str = "") -> str:
    """Three significant digits, whole numbers in full, thousands apart: 12,345 or 0.0123."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{_digits(value)} {unit}" if unit else _digits(value)


def format_score(value: float | None) -> str:
    """A reward or an accuracy, with three decimals so that two can be compared: 0.230."""
    return MISSING if value is None else f"{value:.3f}"


def format_tick(value: float) -> str:
    """A round value of an axis: 2.5, 10,000, 1e-05."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def format_fixed(value: float | None, decimals: int) -> str:
    """A number in a column, its decimals below each other."""
    return MISSING if value is None else f"{value:,.{decimals}f}"


def format_share(value: float | None) -> str:
    """A share of one, in percent: 12.3 %."""
    return MISSING if value is None else f"{value * 100:.1f} %"


def format_ratio(value: float | None) -> str:
    """A factor: 1.23×."""
    return MISSING if value is None else f"{value:.2f}×"


def format_duration(seconds: float | None) -> str:
    """Its two largest units: 1 h 04 min, 3 min 20 s, 12.3 s."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_time(seconds: float) -> str:
    """A time since the Unix epoch, in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _digits(value: float) -> str:
    size = abs(value)
    if value == round(value) or size >= 1000:
        return f"{round(value):,}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"
