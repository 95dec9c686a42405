"""The canary: a real sandboxed program that must work, and must fail to do what a sandbox forbids.

It runs when a worker loads the code grader. If it does not sing, no code is run here at all: never
unsandboxed. The error says which knob to turn.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.reward.sandbox.command import SandboxSettings, SandboxUnavailableError
from services.reward.sandbox.process import Program, Sandbox, SandboxLostError, drive

_CPU_SECONDS = 20.0
_TOKEN = "canary sings"  # noqa: S105  no secret
_PROGRAM = f"""
import ctypes, os, socket
escaped = []
def attempt(name, action):
    try:
        action()
    except Exception:
        return
    escaped.append(name)
def see_processes():
    if not any(name.isdigit() for name in os.listdir("/proc")):
        raise LookupError
def system_call(number, *arguments):
    if ctypes.CDLL(None).syscall(number, *arguments) < 0:
        raise OSError
attempt("read /etc/shadow", lambda: open("/etc/shadow").close())
attempt("open a socket", lambda: socket.socket())
attempt("see processes", see_processes)
attempt("fork", os.fork)
attempt("run a program", lambda: os.execv({os.path.realpath("/bin/true")!r}, ["true"]))
attempt("signal another process", lambda: os.kill(os.getppid(), 0))
attempt("use clone3", lambda: system_call(435, 0, 0))
attempt("make a namespace", lambda: ctypes.CDLL(None).unshare(0x10000000) and 1 / 0)
attempt("write outside /tmp", lambda: open("/escaped", "w").close())
open("own", "w").write("own")
print(escaped or {_TOKEN!r}, dict(os.environ) or "", sep="")
"""


def check(settings: SandboxSettings) -> None:
    """Returns when code can be run safely. Raises SandboxUnavailableError."""
    output = bytearray()
    sandbox = None
    try:
        sandbox = Sandbox.start(settings)
        program = Program(sandbox, settings.job(_PROGRAM, "program", _CPU_SECONDS), output.extend)
        program.end_input()
        drive([program])
    except SandboxLostError as error:
        raise SandboxUnavailableError(f"no sandbox can be made: {error}; {_knob()}") from error
    finally:
        if sandbox:
            sandbox.kill()
    if output.decode(errors="replace").strip() != _TOKEN:
        found = output.decode(errors="replace").strip() or f"nothing ({program.report})"
        raise SandboxUnavailableError(
            f"the sandbox does not hold: its canary said {found:.200}; report this, with the kernel"
            " version; no code is run"
        )


def _knob() -> str:
    """What most likely stands in the way on this host, and what to do about it."""
    if _number("/proc/sys/user/max_user_namespaces") == 0:
        return "user namespaces are off: sysctl user.max_user_namespaces=10000"
    if _number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        return "user namespaces are off: sysctl kernel.unprivileged_userns_clone=1"
    if _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "AppArmor forbids user namespaces: sysctl"
            " kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile"
            " with `userns,`"
        )
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "a container needs a seccomp profile that allows clone, unshare, mount, umount2,"
            " pivot_root and sethostname: --security-opt seccomp=deploy/seccomp.json"
        )
    return (
        "this kernel must allow user namespaces, seccomp filters and pidfds (Linux 5.3 or newer,"
        " not gVisor), or set ROLLPACKER_REWARD_SANDBOX_BWRAP to a bubblewrap that works here"
    )


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
