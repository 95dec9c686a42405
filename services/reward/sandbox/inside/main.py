"""The runner: the first program of a sandbox. It runs one solution after the other, each in a fork.

    service --control socket--> runner --stdin, stdout pipes--> solution

It starts with CAP_SYS_ADMIN in its own user namespace, for one thing: a fresh bounded /tmp for
each solution. A solution has no capability, no descriptor but 0, 1 and 2, and is under the seccomp
filter before its first line runs, so it cannot touch the runner, outlive its own process or start
another. The runner holds nothing worth stealing: it never sees what output is expected.

Frames on the control socket: a kind byte, four bytes of length, the payload.
  to the runner    J job (JSON)   I input bytes   E end of input   K kill the solution
  from the runner  R ready        O output bytes  X report (JSON)
A job: {source, mode (program, calls or checks), setup (of checks), cpu_seconds, wall_seconds,
memory_bytes, output_bytes, file_bytes, disk_bytes, files, threads}. A report: {ended_by, code,
cpu_seconds, wall_seconds}; ended_by is one of exit, signal, cpu, wall, output, killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import sys
import time
from typing import Any

from . import solution

_HEAD = struct.Struct(">cI")
_CHUNK = 1 << 16
_HIGHEST_RUNNER_PID = 2  # in a namespace of its own, after bubblewrap's pid 1
_MOST_UNSENT = 1 << 18  # bytes towards the service; then the solution's output waits
_LONGEST_WAIT_SECONDS = 0.25
_MS_NOSUID_NODEV, _MNT_DETACH = 6, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Control:
    """The frames of the control socket, without ever blocking."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.unsent = bytearray()
        self._received = bytearray()
        os.set_blocking(descriptor, False)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.unsent += _HEAD.pack(kind, len(payload)) + payload

    def flush(self) -> None:
        """Write what the socket takes. Raises OSError when the service is gone."""
        try:
            del self.unsent[: os.write(self.descriptor, self.unsent)]
        except BlockingIOError:
            return

    def receive(self) -> None:
        """Read what is there. Raises EOFError when the service is gone."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            raise EOFError
        self._received += chunk

    def next_frame(self) -> tuple[bytes, bytes] | None:
        """The next whole frame, if it has arrived."""
        if len(self._received) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack_from(self._received)
        end = _HEAD.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEAD.size : end])
        del self._received[:end]
        return kind, payload


class Child:
    """One running solution: its pipes, its clock, and how it ended."""

    def __init__(self, pid: int, stdin: int, stdout: int, job: dict[str, Any]) -> None:
        self.pid, self.stdin, self.stdout, self.job = pid, stdin, stdout, job
        self.unwritten = bytearray()
        self.input_ended = False
        self.output_left = int(job["output_bytes"])
        self.ended_by = ""
        self._start = time.monotonic()
        self._clock = (~pid << 3) | 2  # the CPU clock of another process, as clock_gettime takes it
        self.exit_event = os.pidfd_open(pid)
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)

    def kill(self, ended_by: str) -> None:
        """Repeat: no effect; the first reason counts."""
        self.ended_by = self.ended_by or ended_by
        os.kill(self.pid, signal.SIGKILL)

    def check_limits(self) -> float:
        """Kill it if it is over a limit; returns seconds until the next check."""
        wall_left = self.job["wall_seconds"] - (time.monotonic() - self._start)
        cpu_left = self.job["cpu_seconds"] - time.clock_gettime(self._clock)
        if cpu_left <= 0:
            self.kill("cpu")
        elif wall_left <= 0:
            self.kill("wall")
        return float(max(0.001, min(cpu_left, wall_left, _LONGEST_WAIT_SECONDS)))

    def write(self) -> None:
        try:
            del self.unwritten[: os.write(self.stdin, self.unwritten[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # the solution reads no more
            self.unwritten.clear()
            self.input_ended = True
        self.close_finished_input()

    def close_finished_input(self) -> None:
        if self.input_ended and not self.unwritten and self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def read(self) -> bytes:
        """Output that is there, up to the limit."""
        try:
            chunk = os.read(self.stdout, _CHUNK)
        except BlockingIOError:
            return b""
        if not chunk:
            os.close(self.stdout)
            self.stdout = -1
        if len(chunk) > self.output_left:
            self.kill("output")
            chunk = chunk[: self.output_left]
        self.output_left -= len(chunk)
        return chunk

    def reap(self) -> bytes:
        """Its report, once it has exited and its output is read."""
        _, status, usage = os.wait4(self.pid, 0)
        for descriptor in (self.stdin, self.stdout, self.exit_event):
            if descriptor >= 0:
                os.close(descriptor)
        code = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        if code == -signal.SIGXCPU:
            self.ended_by = self.ended_by or "cpu"
        report = {
            "ended_by": self.ended_by or ("signal" if code < 0 else "exit"),
            "code": code,
            "cpu_seconds": cpu,
            "wall_seconds": time.monotonic() - self._start,
        }
        return json.dumps(report).encode()


def main() -> None:
    """Serve until the control socket is closed. Each fork runs its solution and ends there."""
    if os.getpid() > _HIGHEST_RUNNER_PID:
        raise SystemExit("this is no sandbox: the runner would mount over the host's /tmp")
    control = Control(int(sys.argv[1]))
    solution.warm_up()
    control.send(b"R")
    while True:
        job = _next_job(control)
        if job is None:
            return
        child = _start(job)
        if child is None:  # in the fork
            solution.run(job)
        try:
            control.send(b"X", _supervise(child, control))
        except (EOFError, OSError):  # the service is gone, and with this process the solution
            return


def _next_job(control: Control) -> dict[str, Any] | None:
    """The next job; None when the service is gone. Input of a solution that is gone is dropped."""
    try:
        while True:
            while frame := control.next_frame():
                if frame[0] == b"J":
                    job: dict[str, Any] = json.loads(frame[1])
                    return job
            poll = select.poll()
            poll.register(
                control.descriptor, select.POLLIN | (select.POLLOUT * bool(control.unsent))
            )
            poll.poll()
            if control.unsent:
                control.flush()
            control.receive()
    except (EOFError, OSError):
        return None


def _start(job: dict[str, Any]) -> Child | None:
    """Fork; None in the child, which is then confined."""
    _fresh_directory(job)
    os.ftruncate(2, 0)  # what the last solution said there would count towards this one's limit
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(read_in, 0)
        os.dup2(write_out, 1)
        os.closerange(3, 1 << 20)
        solution.confine(job)
        return None
    os.close(read_in)
    os.close(write_out)
    return Child(pid, write_in, read_out, job)


def _fresh_directory(job: dict[str, Any]) -> None:
    """An empty /tmp of bounded size and count of files, whatever the last solution left there."""
    os.chdir("/")
    _libc.umount2(b"/tmp", _MNT_DETACH)  # fails before the first mount
    options = f"size={job['disk_bytes']},nr_inodes={job['files']},mode=700".encode()
    if _libc.mount(b"tmpfs", b"/tmp", b"tmpfs", _MS_NOSUID_NODEV, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of /tmp: {os.strerror(number)}")
    os.chdir("/tmp")  # noqa: S108  a mount of our own


def _supervise(child: Child, control: Control) -> bytes:
    """Move bytes and watch the limits until the solution is gone; returns its report."""
    exited = False
    while not (exited and child.stdout < 0):
        wait = _LONGEST_WAIT_SECONDS if exited else child.check_limits()
        while frame := control.next_frame():  # some may have come together with the job
            _take(child, frame)
        ready = _poll(child, control, wait)
        if control.descriptor in ready:
            control.flush()
            control.receive()
        if child.stdin in ready:
            child.write()
        if child.stdout in ready and (output := child.read()):
            control.send(b"O", output)
        exited = exited or child.exit_event in ready
        if control.unsent:
            control.flush()
    return child.reap()


def _poll(child: Child, control: Control, wait: float) -> set[int]:
    poll = select.poll()
    poll.register(control.descriptor, select.POLLIN | (select.POLLOUT * bool(control.unsent)))
    poll.register(child.exit_event, select.POLLIN)
    if child.unwritten and child.stdin >= 0:
        poll.register(child.stdin, select.POLLOUT)
    if child.stdout >= 0 and len(control.unsent) < _MOST_UNSENT:
        poll.register(child.stdout, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(wait * 1000)}


def _take(child: Child, frame: tuple[bytes, bytes]) -> None:
    kind, payload = frame
    if kind == b"I" and not child.input_ended:
        child.unwritten += payload
    elif kind == b"E":
        child.input_ended = True
        child.close_finished_input()
    elif kind == b"K":
        child.kill("killed")
