"""One sandbox as a grading worker sees it: started early, used for one response, then killed.

States: starting -> ready -> (running a program -> ready)* -> dead. Starting takes some 30 ms and is
not waited for, so a worker starts the next sandbox before it needs it. Whatever goes wrong with a
sandbox itself is SandboxLostError, which is no verdict.

`kill` ends every process of the sandbox and waits until the last is gone: pid 1 of its namespace is
killed, and the kernel lets that one go only after all the others. A sandbox whose worker dies ends
by itself, as the control socket closes: its runner leaves, so pid 1 leaves, so the kernel kills the
rest. (bubblewrap's --die-with-parent would leave its pid 1 waiting for ever when the parent dies in
the few milliseconds before that one has armed itself.)
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from services.reward.sandbox.command import (
    SandboxSettings,
    SandboxUnavailableError,
    sandbox_command,
)

_HEAD = struct.Struct(">cI")
_CHUNK = 1 << 18
_START_LIMIT_SECONDS = 60.0  # on a very busy host
_SLACK_SECONDS = 10.0  # beyond the wall limit, which the runner keeps
_MOST_PAYLOAD = 1 << 20  # of a frame of a runner
_COUNT_THREADS_SECONDS = 0.05
_MOST_ERRORS = 1 << 16  # bytes


class SandboxLostError(Exception):
    """The sandbox failed, through no fault of the solution that can be told."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """How a run ended: ended_by is exit, signal, cpu, wall, output, killed or threads."""

    ended_by: str
    code: int  # exit code, or minus the signal
    cpu_seconds: float
    wall_seconds: float


class Sandbox:
    """Made by `start`; whoever made it calls `kill` in the end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        info: IO[bytes],
        log: IO[bytes],
    ) -> None:
        self._process, self._info, self._log = process, info, log
        self.control = control
        self.unsent = bytearray()  # of this program or, whole frames, of one that ended early
        self._ready = False
        self._init_pid: int | None = None
        self._init: int | None = None  # pidfd of pid 1 in its namespace

    @classmethod
    def start(cls, settings: SandboxSettings) -> Self:
        """Start one; it need not be ready yet. Raises SandboxUnavailableError, SandboxLostError."""
        ours, theirs = socket.socketpair()
        # Files, not pipes: bubblewrap must not die of SIGPIPE in the middle of its start.
        info = os.fdopen(os.memfd_create("bwrap-info"), "rb")
        log = os.fdopen(os.memfd_create("bwrap-errors"), "rb")
        # Opened anew, to be written only: a program finds nothing there of the one before it.
        errors = os.open(f"/proc/self/fd/{log.fileno()}", os.O_WRONLY | os.O_APPEND)
        try:
            command = sandbox_command(settings, theirs.fileno(), info.fileno())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={},
                pass_fds=(theirs.fileno(), info.fileno()),
                start_new_session=True,  # it ends by its socket, not with its worker's group
            )
        except (OSError, SandboxUnavailableError) as error:
            for file in (ours, info, log):
                file.close()
            if isinstance(error, SandboxUnavailableError):
                raise
            raise SandboxLostError(f"bubblewrap cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(errors)
        return cls(process, ours, info, log)

    def wait_ready(self) -> None:
        """Until its runner answers. Raises SandboxLostError, with what bubblewrap said."""
        if self._ready:
            return
        self.control.settimeout(_START_LIMIT_SECONDS)
        try:
            head = self.control.recv(_HEAD.size, socket.MSG_WAITALL)
        except OSError as error:
            raise SandboxLostError(f"a sandbox did not start: {error}") from error
        if len(head) < _HEAD.size:
            raise SandboxLostError(f"a sandbox did not start: {self.errors() or 'no reason given'}")
        self._init = os.pidfd_open(self.init_pid)
        self.control.setblocking(False)
        self._ready = True

    @property
    def init_pid(self) -> int:
        """Pid 1 of the sandbox, as this host counts; known once it is ready."""
        if self._init_pid is None:
            self._info.seek(0)
            try:
                self._init_pid = int(json.loads(self._info.read())["child-pid"])
            except ValueError as error:
                raise SandboxLostError(f"bubblewrap gave no pid: {self.errors()}") from error
        return self._init_pid

    def errors(self) -> str:
        """What bubblewrap and Python wrote to standard error."""
        self._process.wait(_START_LIMIT_SECONDS)
        self._log.seek(0)
        return self._log.read(4096).decode(errors="replace").strip()

    def standard_error(self) -> str:
        """The end of what programs wrote to standard error so far: anything they like."""
        log = self._log.fileno()
        start = max(0, os.fstat(log).st_size - _MOST_ERRORS)
        return os.pread(log, _MOST_ERRORS, start).decode(errors="replace")

    def kill(self) -> None:
        """End it and wait until nothing of it is left. Repeat: no effect."""
        if self._process.returncode is not None and self.control.fileno() < 0:
            return
        self.control.close()
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            gone = select.poll()
            gone.register(self._init, select.POLLIN)
            gone.poll()
            os.close(self._init)
            self._init = None
        self._process.wait()  # a sandbox that was not ready yet ends as its socket is closed
        self._info.close()
        self._log.close()


class Program:
    """One run in a sandbox. `drive` moves it; its report is there when it has ended."""

    def __init__(
        self, sandbox: Sandbox, job: dict[str, Any], on_output: Callable[[bytes], None]
    ) -> None:
        sandbox.wait_ready()
        self.report: RunReport | None = None
        self.socket = sandbox.control
        self._init_pid = sandbox.init_pid
        self._thread_limit = int(job["threads"])
        self._too_many_threads = False
        self._on_output = on_output
        self._received = bytearray()
        self._unsent = sandbox.unsent
        self.deadline = time.monotonic() + job["wall_seconds"] + _SLACK_SECONDS
        self._send(b"J", json.dumps(job).encode())

    def feed(self, data: bytes) -> None:
        """More standard input."""
        for start in range(0, len(data), _CHUNK):
            self._send(b"I", data[start : start + _CHUNK])

    def end_input(self) -> None:
        self._send(b"E")

    def stop(self) -> None:
        """Kill the program; its report comes. Repeat, or after its end: no effect."""
        if self.report is None:
            self._send(b"K")

    def check_threads(self) -> None:
        """Stop the program if it has too many threads: the kernel counts none of root's."""
        if _most_threads(self._init_pid) > self._thread_limit:
            self._too_many_threads = True
            self.stop()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def write(self) -> None:
        try:
            del self._unsent[: self.socket.send(self._unsent[:_CHUNK])]
        except BlockingIOError:
            return

    def read(self) -> None:
        """Take what has arrived. Raises SandboxLostError."""
        try:
            chunk = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            raise SandboxLostError("a sandbox ended while it ran a program")
        self._received += chunk
        while self.report is None and len(self._received) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received)
            if length > _MOST_PAYLOAD:
                raise SandboxLostError(f"a sandbox sent a frame of {length} bytes")
            end = _HEAD.size + length
            if len(self._received) < end:
                return
            self._take(kind, bytes(self._received[_HEAD.size : end]))
            del self._received[:end]

    def _take(self, kind: bytes, payload: bytes) -> None:
        if kind == b"O":
            self._on_output(payload)
            return
        try:
            report = RunReport(**json.loads(payload))
            self.report = replace(report, ended_by="threads") if self._too_many_threads else report
        except (ValueError, TypeError) as error:
            raise SandboxLostError(f"a sandbox sent no report: {error}") from error

    def _send(self, kind: bytes, payload: bytes = b"") -> None:
        self._unsent += _HEAD.pack(kind, len(payload)) + payload


def drive(programs: Sequence[Program], on_end: Callable[[Program], None] = lambda _: None) -> None:
    """Move programs until all have their report; calls on_end as each ends.

    Raises SandboxLostError, after which the sandboxes must be killed.
    """
    running = list(programs)
    while running:
        left = min(program.deadline for program in running) - time.monotonic()
        if left <= 0:
            raise SandboxLostError("a sandbox kept no time limit")
        poll = select.poll()
        for program in running:
            events = select.POLLIN | (select.POLLOUT * program.wants_write)
            poll.register(program.socket, events)
        wait = min(left, _COUNT_THREADS_SECONDS) if os.geteuid() == 0 else left
        ready = {descriptor for descriptor, _ in poll.poll(wait * 1000)}
        for program in running:
            if os.geteuid() == 0:
                program.check_threads()
            if program.socket.fileno() in ready:
                _move(program)
        for program in [program for program in running if program.report]:
            running.remove(program)
            on_end(program)


def _move(program: Program) -> None:
    try:
        if program.wants_write:
            program.write()
        program.read()
    except OSError as error:
        raise SandboxLostError(f"a sandbox was lost: {error}") from error


def _most_threads(init_pid: int) -> int:
    """Threads of the busiest process below pid 1 of a sandbox."""
    most, pids = 0, _children(init_pid)
    while pids:
        pid = pids.pop()
        try:
            most = max(most, len(os.listdir(f"/proc/{pid}/task")))
        except OSError:  # it has ended
            continue
        pids += _children(pid)
    return most


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]
