"""Child processes that are kept alive, and ended in order.

Each process is *running*, *waiting* for its restart, or *ended*; one asyncio task per process
moves it. A process that ends on its own is started again by `restart_policy`; when that gives up,
the supervisor has *failed* and every waiter gets a StackError with the end of the log. A stop goes
through the stages in order: SIGTERM to a stage, a grace, then kill, then the next stage.

Each process leads a session of its own: Ctrl-C in the terminal reaches the supervisor alone, and
what a dead process left in its group is killed before it is started again. A process never
outlives the supervisor, not even after kill -9 (see `child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.local_stack import child
from rollpacker.local_stack.restart_policy import RestartLimits, RestartPolicy

_TAIL_LINES = 15
_log = logging.getLogger(__name__)


class StackError(Exception):
    """The stack cannot start or go on; the message says which process, why and where to look."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep alive."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the supervisor's own
    stop_stage: int = 0  # lower stages are stopped first
    grace_seconds: float = 10.0  # between SIGTERM and kill


class Supervisor:
    """Keeps processes alive; their logs are `<log directory>/<name>.log`.

    `changed` is called whenever a process was started or ended.
    """

    def __init__(
        self,
        log_directory: Path,
        limits: RestartLimits | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._log_directory = log_directory
        self._limits = limits or RestartLimits()
        self._changed = changed
        self._kept: dict[str, _Kept] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the processes that run now."""
        return {name: kept.pid for name, kept in self._kept.items() if kept.pid}

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process has been started again."""
        return {name: kept.restart_count for name, kept in self._kept.items()}

    def log_path(self, name: str) -> Path:
        return self._log_directory / f"{name}.log"

    def start(self, spec: ProcessSpec) -> None:
        """Begin to keep a process alive."""
        self._log_directory.mkdir(parents=True, exist_ok=True)
        kept = _Kept(spec, self.log_path(spec.name), RestartPolicy(self._limits), self._changed)
        self._kept[spec.name] = kept
        kept.task = asyncio.create_task(kept.keep(self._give_up), name=f"keep {spec.name}")

    def kill(self, name: str) -> None:
        """kill -9, the process group included; the process is started again like any that died."""
        self._kept[name].signal_group(signal.SIGKILL)

    def kill_all(self) -> None:
        """kill -9 for every process: the end of all patience, used while a stop takes too long."""
        for kept in self._kept.values():
            kept.stopping = True
            kept.signal_group(signal.SIGKILL)

    async def wait_failed(self) -> None:
        """Wait until the supervisor has failed; raises StackError."""
        await asyncio.shield(self._failure)

    def check(self) -> None:
        """Raise StackError if the supervisor has failed."""
        if self._failure.done():
            self._failure.result()

    async def stop(self) -> None:
        """End every process, stage by stage. Repeat: no effect."""
        for kept in self._kept.values():
            kept.stopping = True
        for stage in sorted({kept.spec.stop_stage for kept in self._kept.values()}):
            group = [kept for kept in self._kept.values() if kept.spec.stop_stage == stage]
            await asyncio.gather(*(kept.stop() for kept in group))
        self._changed()

    def _give_up(self, error: StackError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # nobody has to wait for it

    def tail(self, name: str) -> str:
        """Where the log of a process is, and its last lines."""
        return _tail(self.log_path(name))


class _Kept:
    """One process and the task that keeps it alive."""

    def __init__(
        self, spec: ProcessSpec, log: Path, policy: RestartPolicy, changed: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.stopping = False
        self.restart_count = 0
        self.task: asyncio.Task[None] | None = None
        self._log = log
        self._policy = policy
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._wake = asyncio.Event()

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else 0

    async def keep(self, give_up: Callable[[StackError], None]) -> None:
        """Run the process again and again until it is stopped or the policy gives up."""
        while not self.stopping:
            try:
                status = await self._run()
            except OSError as error:
                give_up(StackError(f"{self.spec.name} cannot be started: {error}"))
                return
            if self.stopping:
                return
            delay = self._policy.died(time.monotonic())
            if delay is None:
                give_up(StackError(f"{self.spec.name} keeps dying ({status}); {_tail(self._log)}"))
                return
            _log.warning("%s died (%s); starting it again", self.spec.name, status)
            self.restart_count += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), delay)

    async def _run(self) -> str:
        """Run the process once; returns how it ended."""
        command = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *self.spec.command)
        with self._log.open("ab") as log:
            log.write(f"--- {time.strftime('%F %T')} {' '.join(self.spec.command)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )
        self._changed()
        if self.stopping:  # the stop came while the process was being made
            self._process.terminate()
        try:
            code = await self._process.wait()
        finally:
            self.signal_group(signal.SIGKILL)
            self._changed()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    async def stop(self) -> None:
        """SIGTERM, a grace, kill; returns when the process and its task have ended."""
        if self.task is None:
            return
        self._wake.set()
        if self.pid and self._process:
            self._process.terminate()
        done, _ = await asyncio.wait([self.task], timeout=self.spec.grace_seconds)
        if not done:
            _log.warning(
                "%s did not end within %.0f s; killing it", self.spec.name, self.spec.grace_seconds
            )
            self.signal_group(signal.SIGKILL)
        await self.task

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and what it started; no effect when nothing is left."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return f"the end of its log {log}:\n" + "\n".join(f"  {line}" for line in lines)
