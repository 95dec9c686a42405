"""Requests that wait, and the one thread that answers them in batches.

Streamed layers cost the same for one sequence as for many, so whatever waits when a batch ends goes
into the next one, up to a limit. A batch that does not fit into memory is tried again in halves. A
request whose caller must have given up by now is dropped. When nothing has come for a while the
model lets go of its device, for whoever shares it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from services.reward.judge_worker.model import JudgeModel, Reply, Request
from services.reward.judge_worker.residency import DeviceMemoryError


class TooLateError(Exception):
    """The caller's time was over before its turn came."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    since: float  # time.monotonic()
    reply: Future[Reply] = field(default_factory=Future)


class Batches:
    """Any number of threads may `ask` while one is in `run`."""

    def __init__(
        self,
        model: JudgeModel,
        most_sequences: int,
        patience_seconds: float,
        idle_seconds: float,
        *,
        ends_idle: bool = False,
    ) -> None:
        """`ends_idle`: `run` returns when nothing has come for `idle_seconds`."""
        self._ends_idle = ends_idle
        self._model, self._most = model, most_sequences
        self._patience_seconds, self._idle_seconds = patience_seconds, idle_seconds
        self._line: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()

    def ask(self, request: Request) -> Reply:
        """Wait for the reply. Raises DeviceMemoryError, TooLateError."""
        waiting = _Waiting(request, time.monotonic())
        self._line.put(waiting)
        return waiting.reply.result()

    def run(self) -> None:
        """Answer, for ever unless it ends idle. What is a bug ends it, and with it the process,
        which comes back."""
        is_released = False
        while True:
            try:
                first = self._line.get(timeout=None if is_released else self._idle_seconds)
            except queue.Empty:
                if self._ends_idle:
                    return
                self._model.release()
                is_released = True
                continue
            is_released = False
            batch = [first]
            while len(batch) < self._most and not self._line.empty():
                batch.append(self._line.get())
            self._answer([waiting for waiting in batch if self._is_in_time(waiting)])

    def _is_in_time(self, waiting: _Waiting) -> bool:
        if time.monotonic() - waiting.since < self._patience_seconds:
            return True
        waiting.reply.set_exception(TooLateError(f"waited {self._patience_seconds:.0f} s"))
        return False

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        try:
            replies = self._model.complete([waiting.request for waiting in batch])
        except DeviceMemoryError as error:
            if len(batch) == 1:
                batch[0].reply.set_exception(error)
                return
            half = len(batch) // 2
            self._answer(batch[:half])
            self._answer(batch[half:])
            return
        for waiting, reply in zip(batch, replies, strict=True):
            waiting.reply.set_result(reply)
