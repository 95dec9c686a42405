"""What /proc says about processes: who is below whom, who is alive, who is stopped (Linux)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

STOPPED = "T"
_ZOMBIE = "Z"
_STATE, _PARENT, _START = 0, 1, 19  # places in `_fields`


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Processes below `pid`, each with its start time (a process id may be used again)."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = _fields(int(path.parent.name))
            found[int(path.parent.name)] = (int(fields[_PARENT]), fields[_START])
    below = [pid]
    for parent in below:  # grows while it is walked
        for child, (its_parent, start) in found.items():
            if its_parent == parent:
                below.append(child)
                yield child, start


def start_time(pid: int) -> str | None:
    """The start time of a process, None when it has ended."""
    try:
        fields = _fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] == _ZOMBIE else fields[_START]


def state(pid: int) -> str:
    """One letter, see proc(5)."""
    return _fields(pid)[_STATE]


def environment(pid: int) -> list[bytes]:
    """NAME=value, as the process was given them."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
