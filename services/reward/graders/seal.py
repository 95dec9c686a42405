"""What holds a sealed grading worker: a seal against accidents, a filter against attackers.

Model text must never be evaluated, and libraries do it where one does not look (sympify,
parse_expr, eval in a scorer). So a grading worker closes the seal around each task: an audit hook
refuses to compile text, to start a process, to open a socket, to write a file. A library may
swallow the exception and go on to a wrong score; therefore the seal remembers what it refused, and
raises again when it opens.

The seal does not stop an attacker who already runs code in the worker. `confine` does: from then on
the kernel refuses the worker every new process, program and socket, every signal to others, and
every change of a file, whoever asks. It can still read files, and has nowhere to send them but its
replies.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from services.reward.graders.grader import GraderUnavailableError
from services.reward.sandbox.inside import seccomp

_REFUSED_PREFIXES = ("subprocess.", "socket.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
_REFUSED_EVENTS = frozenset(
    {"os.system", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.kill", "pty.spawn"}
)
_WRITES_ITS_OWN = "sympy.polys.monomials"  # compiles functions that it wrote itself
_IMPORTING = "<frozen importlib._bootstrap>"
_TEXT_FILE = "<string>"  # the file name that eval, exec and compile of text go by
_WRITING = frozenset("wax+")
_KNOB = (
    "the kernel must have CONFIG_SECCOMP_FILTER, on x86_64 or aarch64, and a container's seccomp"
    " profile must allow prctl: --security-opt seccomp=deploy/seccomp.json"
)


class EvaluationRefusedError(Exception):
    """The grading tried what a closed seal refuses; the message says what."""


class Seal:
    """The seal of this process; make one, at the start (an audit hook cannot be removed)."""

    def __init__(self) -> None:
        self._closed = False
        self._refused = ""
        sys.addaudithook(self._audit)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the seal for a while. Raises EvaluationRefusedError at the end if it refused."""
        self._closed, self._refused = True, ""
        try:
            yield
        finally:
            self._closed = False
        if self._refused:
            raise EvaluationRefusedError(self._refused)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._closed and _is_refused(event, arguments):
            self._refused = f"it tried to {_name(event)}, which grading never may"
            raise EvaluationRefusedError(self._refused)


def confine() -> None:
    """Put this process under the read-only filter, for ever. Raises GraderUnavailableError."""
    try:
        if sys.platform != "linux":
            raise OSError(f"{sys.platform} has no seccomp")
        seccomp.install(read_only=True)
    except (OSError, ValueError) as error:
        raise GraderUnavailableError(
            f"a grading worker cannot be confined by seccomp: {error}; {_KNOB}"
        ) from error
    if _reaches_outside():
        raise GraderUnavailableError(
            "the seccomp filter of a grading worker does not hold; report this, with the kernel"
            f" version; {_KNOB}"
        )


def _reaches_outside() -> bool:
    """Whether this process can open a socket or a file for writing."""
    for attempt in (socket.socket, lambda: os.open(os.devnull, os.O_WRONLY)):
        try:
            attempt()
        except PermissionError:
            continue
        return True
    return False


def _is_refused(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "compile":
        return bool(arguments[1] == _TEXT_FILE) and not _is_own_text()
    if event == "open":
        return not _WRITING.isdisjoint(arguments[1] or "r")
    return event in _REFUSED_EVENTS or event.startswith(_REFUSED_PREFIXES)


def _is_own_text() -> bool:
    """Whether a library compiles text of its own: while it is imported, or as known above."""
    frame: FrameType | None = sys._getframe(3)  # below this function, _is_refused and _audit
    if frame and frame.f_globals.get("__name__") == _WRITES_ITS_OWN:
        return True
    while frame:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def _name(event: str) -> str:
    names = {"compile": "evaluate text as Python", "open": "write a file"}
    return names.get(event, f"call {event}")
