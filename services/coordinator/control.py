"""What people want of a run, as its driver sees it; the durable copy is the status in Redis.

    running --PauseRun--> pausing --step committed--> paused --ResumeRun--> running
       |                                                |
       +------------------ StopRun --> stopping <-------+

The driver asks at its gate, before each step, whether it may go on. Pausing or stopping at once
interrupts the step; the driver then comes back to its gate by the way of a restart.
"""

from __future__ import annotations

import asyncio

from rollpacker.rpc.waiting import told_while_waiting
from rollpacker.store.records import RunState

_STOPS = ("after_step", "immediately")


class RunControl:
    """The wishes for one run."""

    def __init__(self, state: RunState, lock: asyncio.Lock) -> None:
        """`lock`: see `ActiveRun`."""
        self.stop_mode = state.stop_mode
        self.paused = state.status == "paused"
        self.pause_at = state.pause_at
        self.lock = lock
        self._interrupted = asyncio.Event()
        self._changed = asyncio.Event()
        self._at_gate = asyncio.Event()

    @property
    def stops(self) -> bool:
        """Whether no further step may begin."""
        return self.stop_mode in _STOPS

    @property
    def drains(self) -> bool:
        """Whether no new prompts may be drawn."""
        return self.stop_mode == "drain"

    def pauses(self, state: RunState) -> bool:
        """Whether the next step must wait. A step that has begun comes to its end first."""
        is_reached = self.pause_at is not None and state.step >= self.pause_at
        return self.paused or (is_reached and state.begun_step != state.step)

    def stop(self, mode: str) -> None:
        """`mode` is after_step, drain or immediately."""
        self.stop_mode, self.paused, self.pause_at = mode, False, None
        if mode == "immediately":
            self._interrupted.set()
        self._changed.set()

    def pause(self, at: int) -> None:
        """Before the first step that begins with so many steps committed."""
        self.pause_at = at
        self._changed.set()

    async def pause_now(self) -> None:
        """Returns when the step is interrupted and the driver waits, or has ended."""
        self.paused, self.pause_at = True, None
        if not self._at_gate.is_set():
            self._interrupted.set()
        self._changed.set()
        await self._at_gate.wait()

    def go_on(self, until_step: int | None) -> None:
        """Let it go on, to its end or until so many steps are committed."""
        self.paused, self.pause_at = False, until_step
        self._changed.set()

    async def interrupted(self) -> None:
        """Wait until the step is to be interrupted."""
        await self._interrupted.wait()
        self._interrupted.clear()

    async def wait(self, what: str) -> None:
        """At the gate: wait for another wish."""
        self._changed.clear()
        self._at_gate.set()
        try:
            async with told_while_waiting(what):
                await self._changed.wait()
        finally:
            self._at_gate.clear()

    def end(self) -> None:
        """The driver has ended: nobody waits for it any more."""
        self._at_gate.set()
