"""One grading worker as the service sees it: started, asked, and killed.

States: started -> loaded with some graders -> (asked -> replied)* -> dead. It is never asked twice
at once. It dies by `kill`, or by itself, which shows as WorkerLostError at the next use.

The worker is started by vfork and exec (no fork after gRPC has begun) in its own session, so that
Ctrl-C in a terminal reaches the service only. Its environment holds no secrets.

A task's time limit is CPU time of the worker: on a busy host a task does not run out of it by
waiting for a core. A task that neither computes nor replies ends at WALL_FACTOR times the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from rollpacker.types import GraderKind
from services.reward import framing
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingTask,
    ProgramOutcome,
    ProgramTask,
    Score,
)

START_LIMIT_SECONDS = 120.0  # to start a worker or load a grader, on a very busy host
WALL_FACTOR = 10.0
_COMMAND = (sys.executable, "-m", "services.reward.grading_worker")
_LEAST_WAIT_SECONDS = 0.02  # CPU times are counted in ticks of 10 ms
KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class WorkerLostError(Exception):
    """The worker died or did not start, through no fault of the task that can be told."""


class TimeLimitError(Exception):
    """The task used up its time; the worker still runs and must be killed."""


@dataclass(frozen=True, slots=True)
class GradingOutcome:
    """A score and the seconds that the work took, without waiting for a slot."""

    score: Score
    elapsed_seconds: float


class WorkerProcess:
    """Made by `start`; whoever made it calls `kill` in the end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loaded: set[GraderKind] = set()

    @classmethod
    async def start(cls, sealed: bool) -> Self:
        """Start a process; it is ready after its first `load`. Raises WorkerLostError.

        Sealed or open: which graders it can load (`grading_worker`).
        """
        try:
            process, connection = _spawn(sealed)
        except OSError as error:
            raise WorkerLostError(f"no grading worker could be started: {error}") from error
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def load(self, kind: GraderKind, settings: Mapping[str, Any]) -> None:
        """Import what a grader needs, outside any time limit.

        Raises WorkerLostError, GraderUnavailableError.
        """
        if kind in self._loaded:
            return
        request = {"load": kind.value, "settings": dict(settings)}
        try:
            reply = await asyncio.wait_for(self._ask(request), START_LIMIT_SECONDS)
        except TimeoutError as error:
            raise WorkerLostError(
                f"grading worker {self.pid} did not load {kind.value}"
                f" within {START_LIMIT_SECONDS:.0f} s"
            ) from error
        if "unavailable" in reply:
            raise GraderUnavailableError(reply["unavailable"])
        self._loaded.add(kind)

    async def grade(self, task: GradingTask, time_limit_seconds: float) -> GradingOutcome:
        """Grade one task; the time limit starts here. Infinity: none but the task's own.

        Raises TimeLimitError, WorkerLostError, BadReferenceError, GraderFailedError.
        """
        start = time.monotonic()
        asked = asyncio.ensure_future(self._ask({"grade": framing.task_to_message(task)}))
        try:
            await self._wait(asked, time_limit_seconds)
        finally:
            asked.cancel()
        reply = asked.result()
        if "bad_reference" in reply:
            raise BadReferenceError(reply["bad_reference"])
        if "failed" in reply:
            raise GraderFailedError(reply["failed"])
        if "lost" in reply:
            raise WorkerLostError(reply["lost"])
        score = framing.score_from_message(reply["score"])
        return GradingOutcome(score, time.monotonic() - start)

    async def run(self, task: ProgramTask) -> ProgramOutcome:
        """Run a program, within its own limits; the code grader is loaded.

        Raises WorkerLostError.
        """
        reply = await self._ask({"run": asdict(task)})
        if "lost" in reply:
            raise WorkerLostError(reply["lost"])
        return ProgramOutcome(**reply["ran"])

    async def kill(self) -> None:
        """End the process and what it started, and wait until it is gone. Repeat: no effect."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes of reward functions are in its group
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def _wait(self, asked: asyncio.Future[framing.Message], limit: float) -> None:
        """Until the reply is there. Raises TimeLimitError."""
        if limit == math.inf:
            await asyncio.wait({asked})
            return
        start, start_cpu = time.monotonic(), _cpu_seconds(self.pid)
        wait = limit
        while True:
            done, _ = await asyncio.wait({asked}, timeout=wait)
            if done:
                return
            wall = time.monotonic() - start
            used = wall if start_cpu is None else (_cpu_seconds(self.pid) or 0.0) - start_cpu
            if used >= limit or wall >= limit * WALL_FACTOR:
                raise TimeLimitError
            wait = max(min(limit - used, limit * WALL_FACTOR - wall), _LEAST_WAIT_SECONDS)

    async def _ask(self, request: framing.Message) -> framing.Message:
        try:
            self._writer.write(framing.encode(request))
            await self._writer.drain()
            return await framing.read(self._reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            code = await asyncio.to_thread(self._process.wait)
            raise WorkerLostError(f"grading worker {self.pid} ended with {code}") from error
        except framing.FramingError as error:
            raise WorkerLostError(f"grading worker {self.pid} sent {error}") from error


def _spawn(sealed: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and our end of the socket that is its standard input; takes a few ms."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*_COMMAND, *([] if sealed else [framing.OPEN_WORKER])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, **_ONE_THREAD, "MPLBACKEND": "Agg", "MPLCONFIGDIR": _plot_directory().name}


@cache
def _plot_directory() -> tempfile.TemporaryDirectory[str]:
    """Empty, until this process ends: reasoning-gym imports matplotlib, which makes a directory of
    settings where it finds none, and a sealed worker may not."""
    return tempfile.TemporaryDirectory(prefix="rollpacker-grading-")


def _cpu_seconds(pid: int) -> float | None:
    """CPU time that a process has used; None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
