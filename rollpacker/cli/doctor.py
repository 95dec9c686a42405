"""`doctor`: is this machine fit for RollPacker? Each finding says what is wrong and the fix.

`gather` looks at the machine and changes nothing; `findings` judges what it saw and is pure. A
finding is `ok`, `note` (works, but not everywhere or not for long) or `bad` (something will fail).
The command ends with 1 where something is bad.
"""

from __future__ import annotations

import ctypes.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollpacker.cli.console import print_table
from rollpacker.cli.coordinator import DEFAULT_PORT
from rollpacker.cli.failures import WORK_FAILED
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.security import Security

GIB = 1024**3
_SHARED = "/dev/shm"  # noqa: S108  only looked at
_COMMAND_SECONDS = 20
Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen. Sizes in bytes; None: could not be found out."""

    gpus: tuple[str, ...] = ()  # lines of nvidia-smi: name, driver
    nccl: bool = False  # the library is here, from torch's packages or the system
    shared_memory: int | None = None  # size of /dev/shm
    open_files: int = 0  # soft limit; -1: none
    locked_memory: int = 0  # soft limit; -1: none
    user_namespaces: bool = False  # an unprivileged process may make one
    apparmor_restricts: bool = False  # it is AppArmor that forbids them
    free_disk: int = 0  # where runs go
    disk_place: str = ""
    port_taken: bool = False  # the coordinator's default port
    clock_synchronised: bool | None = None
    security_problem: str = ""  # why ROLLPACKER_SECURITY_* cannot be used
    certificate_days: int | None = None  # None: no certificate
    redis_persistent: bool | None = None  # None: no Redis was named
    redis_problem: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    subject: str
    level: Level
    what: str
    fix: str = ""


def findings(facts: Facts) -> list[Finding]:
    """What the facts mean, in the order of the table."""
    return [
        *_hardware(facts),
        *_limits(facts),
        *_surroundings(facts),
        *_secrets_and_redis(facts),
    ]


def _hardware(facts: Facts) -> list[Finding]:
    found = [Finding("gpu", "ok", gpu) for gpu in facts.gpus] or [
        Finding("gpu", "note", "none; CPU only", "install the NVIDIA driver where there is a GPU")
    ]
    if facts.gpus and not facts.nccl:
        fix = "install the CUDA build of torch: it brings NCCL; the CPU build does not"
        found.append(Finding("nccl", "note", "not found: no trainer on several GPUs", fix))
    elif facts.gpus:
        found.append(Finding("nccl", "ok", "found"))
    size = facts.shared_memory
    if size is None:
        found.append(Finding(_SHARED, "bad", "missing", "mount -t tmpfs tmpfs /dev/shm"))
    elif size < (8 * GIB if facts.gpus else GIB // 16):
        fix = "mount -o remount,size=16g /dev/shm; for containers: shm_size"
        found.append(Finding(_SHARED, "bad", f"{size / GIB:.2f} GiB", fix))
    else:
        found.append(Finding(_SHARED, "ok", f"{size / GIB:.1f} GiB"))
    gib = facts.free_disk / GIB
    fix = f"free space in {facts.disk_place}, or run elsewhere" if gib < 10 else ""
    level: Level = "bad" if gib < 1 else "note" if gib < 10 else "ok"
    return [*found, Finding("disk", level, f"{gib:.0f} GiB free in {facts.disk_place}", fix)]


def _limits(facts: Facts) -> list[Finding]:
    few = 0 <= facts.open_files < 4096
    locked = facts.locked_memory
    limited = bool(facts.gpus) and locked != -1
    return [
        Finding(
            "open files",
            "bad" if few else "ok",
            "no limit" if facts.open_files < 0 else str(facts.open_files),
            "ulimit -n 65536" if few else "",
        ),
        Finding(
            "locked memory",
            "note" if limited else "ok",
            "no limit" if locked < 0 else f"{locked // 1024} KiB",
            "ulimit -l unlimited, for NCCL over InfiniBand" if limited else "",
        ),
    ]


def _surroundings(facts: Facts) -> list[Finding]:
    fix = "sysctl user.max_user_namespaces=65536; in a container: the profile deploy/seccomp.json"
    if facts.apparmor_restricts:
        fix = "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    clock = facts.clock_synchronised
    return [
        Finding("user namespaces", "ok", "allowed")
        if facts.user_namespaces
        else Finding("user namespaces", "note", "refused: no sandbox for code", fix),
        Finding("port", "note", f"{DEFAULT_PORT} is taken", "rollpacker up --port, or stop it")
        if facts.port_taken
        else Finding("port", "ok", f"{DEFAULT_PORT} is free"),
        Finding("clock", "ok", "synchronised")
        if clock
        else Finding(
            "clock",
            "note",
            "not synchronised" if clock is False else "unknown",
            "timedatectl set-ntp true; certificates and traces need the time",
        ),
    ]


def _secrets_and_redis(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    days = facts.certificate_days
    if facts.security_problem:
        found.append(Finding("security", "bad", facts.security_problem, "docs/security.md"))
    elif days is None:
        found.append(Finding("security", "ok", "no certificates: loopback only"))
    else:
        level: Level = "bad" if days < 0 else "note" if days < 30 else "ok"
        fix = "make certs, then restart the clients" if level != "ok" else ""
        found.append(Finding("security", level, f"the certificate ends in {days} days", fix))
    if facts.redis_problem:
        fix = "check ROLLPACKER_COORDINATOR_REDIS_URL, and that the server runs"
        found.append(Finding("redis", "bad", facts.redis_problem, fix))
    elif facts.redis_persistent is False:
        what = "keeps nothing over a restart"
        found.append(Finding("redis", "bad", what, "appendonly yes in its configuration"))
    elif facts.redis_persistent:
        found.append(Finding("redis", "ok", "append-only file is on"))
    return found


def gather(directory: Path) -> Facts:
    """Look at this machine; `directory` is where runs go."""
    place = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    security_problem, days = _security()
    redis_persistent, redis_problem = _redis(os.environ.get("ROLLPACKER_COORDINATOR_REDIS_URL", ""))
    gpus = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    clock = _said("timedatectl", "show", "--property=NTPSynchronized", "--value")
    restricts = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    return Facts(
        gpus=tuple(gpus.splitlines()) if gpus else (),
        nccl=_has_nccl(),
        shared_memory=shutil.disk_usage(_SHARED).total if Path(_SHARED).is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        user_namespaces=_said("unshare", "--user", "--map-root-user", "echo", "yes") == "yes",
        apparmor_restricts=restricts.exists() and restricts.read_text().strip() == "1",
        free_disk=shutil.disk_usage(place).free,
        disk_place=str(place),
        port_taken=_is_taken(DEFAULT_PORT),
        clock_synchronised={"yes": True, "no": False}.get(clock or ""),
        security_problem=security_problem,
        certificate_days=days,
        redis_persistent=redis_persistent,
        redis_problem=redis_problem,
    )


def _said(*command: str) -> str | None:
    """What a command printed; None where it is missing or fails."""
    try:
        result = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _has_nccl() -> bool:
    """Looked for as a file: loading it, or torch, would take seconds."""
    in_packages = any(next(Path(p).glob("nvidia/nccl/lib/libnccl.so*"), None) for p in sys.path)
    return in_packages or ctypes.util.find_library("nccl") is not None


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _security() -> tuple[str, int | None]:
    """(what is wrong, days until the certificate ends)."""
    try:
        certificate = Security.from_environment().certificate_file
    except InvalidArgumentError as error:
        return error.message, None
    if certificate is None:
        return "", None
    end = _said("openssl", "x509", "-in", str(certificate), "-noout", "-enddate")
    if end is None:
        return f"{certificate} cannot be read by openssl", None
    import ssl
    import time

    seconds = ssl.cert_time_to_seconds(end.removeprefix("notAfter=")) - time.time()
    return "", int(seconds // 86400)


def _redis(url: str) -> tuple[bool | None, str]:
    """(does it keep an append-only file, why it could not be asked)."""
    if not url:
        return None, ""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            return bool(client.info("persistence")["aof_enabled"]), ""
    except redis.RedisError as error:
        return None, f"no answer: {type(error).__name__}"  # its text could hold the password
    except ValueError:
        return None, "its URL is none of redis://, rediss:// and unix://"


def doctor(
    directory: Annotated[Path, typer.Option("--runs", help="Where runs leave their outputs.")] = (
        Path("runs")
    ),
) -> None:
    """Check this machine, and say how to mend what is wrong."""
    found = findings(gather(directory))
    rows = [(finding.level, finding.subject, finding.what, finding.fix) for finding in found]
    print_table(("", "subject", "found", "fix"), rows, "")
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(WORK_FAILED)
