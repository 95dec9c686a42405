"""Becomes another program that dies with its parent: `child.py PARENT COMMAND...`.

The kernel is asked to kill this process when its parent ends, however that ends; then the process
becomes COMMAND (exec keeps the request). PARENT is the parent's process id, so that a parent that
died before the request was made is noticed. "agent" is what an outer child.py became: torchrun
starts all its ranks by one command, which cannot name its process id, so the environment does. It
is run as a file by a bare interpreter and imports the standard library only, so it costs
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT_IS_GONE = 1  # exit status
_AGENT = "ROLLPACKER_AGENT_PID"


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` ends; exits if it has already ended (Linux only)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(_PARENT_IS_GONE)


def main(parent: str, *command: str) -> None:
    """Never returns: becomes `command`. Raises OSError when it cannot be run."""
    die_with_parent(int(os.environ[_AGENT] if parent == "agent" else parent))
    os.environ[_AGENT] = str(os.getpid())
    os.execvp(command[0], command)  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main(*sys.argv[1:])
