"""When a process that died is started again, and when the stack gives up on it. Pure.

A process that dies once is back in a moment; each further death within the window doubles the
wait. More than `count` deaths within the window are a fault that restarting does not mend.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How patient the stack is with one process."""

    count: int = 5  # restarts within the window
    window_seconds: float = 300.0
    first_delay_seconds: float = 0.1
    longest_delay_seconds: float = 5.0


class RestartPolicy:
    """The deaths of one process so far."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._deaths: list[float] = []

    def died(self, now: float) -> float | None:
        """Seconds to wait before the restart, or None to give up. `now` is in seconds."""
        limits = self._limits
        self._deaths = [t for t in self._deaths if now - t < limits.window_seconds]
        self._deaths.append(now)
        if len(self._deaths) > limits.count:
            return None
        delay = limits.first_delay_seconds * 2.0 ** (len(self._deaths) - 1)
        return min(delay, limits.longest_delay_seconds)
