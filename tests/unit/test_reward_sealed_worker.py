"""What the kernel lets a grading worker do once hostile code runs in it: real workers whose grader
makes the system calls that a response names, past every audit hook."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollpacker.types import GraderKind, Verdict
from services.reward import grading, worker_process
from services.reward.graders.grader import GraderUnavailableError, GradingTask
from services.reward.sandbox.inside import seccomp
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import WorkerProcess

_OBEDIENT_WORKER = """
import ctypes, json
from rollpacker.types import GraderKind, Verdict
from services.reward import grading_worker
from services.reward.graders.custom import CustomGrader
from services.reward.graders.grader import Score
from services.reward.graders.math import MathGrader
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    arguments = [it.encode() if isinstance(it, str) else it for it in arguments]
    return 0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()
def obey(self, task):
    errors = {name: call(*request) for name, request in json.loads(task.response_text).items()}
    return Score(0.0, Verdict.INCORRECT, json.dumps(errors))
MathGrader.grade = CustomGrader.grade = obey
grading_worker.main()
"""
# Under the sandbox's filter no further one can be installed.
_WORKER_WITHOUT_SECCOMP = """
from services.reward import grading_worker
from services.reward.sandbox.inside import seccomp
seccomp.install()
grading_worker.main()
"""
AT_FDCWD, AF_UNIX, SIGCHLD = -100, 1, 17


def number(name: str) -> int:
    tables = {**seccomp._ALLOWED, **seccomp._DENIED, **seccomp._SIGNALS}
    tables |= {"clone": seccomp._CLONE, "socketpair": seccomp._SOCKETPAIR}
    found = tables[name][seccomp.MACHINES.index(os.uname().machine)]
    assert found is not None
    return found


def attempts(directory: Path) -> dict[str, list[Any]]:
    """System calls that succeed in an open worker, or fail there for another reason than EPERM."""
    (directory / "kept").write_text("kept")
    return {
        "open a socket": [number("socket"), AF_UNIX, 1, 0],
        "connect": [number("connect"), -1, 0, 0],
        "make a socketpair": [number("socketpair"), AF_UNIX, 1, 0, 0],
        "fork": [number("clone"), SIGCHLD, 0, 0, 0, 0],
        "run a program": [number("execve"), "/nowhere/program", 0, 0],
        "create a file": [number("openat"), AT_FDCWD, str(directory / "new"), 0o102, 0o600],
        "write a file": [number("openat"), AT_FDCWD, str(directory / "kept"), os.O_WRONLY],
        "truncate a file": [number("truncate"), str(directory / "kept"), 0],
        "make a directory": [number("mkdirat"), AT_FDCWD, str(directory / "made"), 0o700],
        "remove a file": [number("unlinkat"), AT_FDCWD, str(directory / "missing"), 0],
        "signal the service": [number("kill"), os.getpid(), 0],
        "trace a process": [number("ptrace"), 16, 0, 0, 0],
        "make memory that can be run": [number("memfd_create"), "x", 0],
    }


async def errors_in(
    monkeypatch: pytest.MonkeyPatch, sealed: bool, calls: dict[str, list[Any]]
) -> dict[str, int]:
    """What each call came to in a worker: 0 or its errno."""
    monkeypatch.setattr(worker_process, "_COMMAND", (sys.executable, "-c", _OBEDIENT_WORKER))
    kind = GraderKind.MATH if sealed else GraderKind.CUSTOM
    worker = await WorkerProcess.start(sealed)
    try:
        await worker.load(kind, {})
        outcome = await worker.grade(GradingTask(kind, json.dumps(calls), "{}"), 1000.0)
    finally:
        await worker.kill()
    errors: dict[str, int] = json.loads(outcome.score.extracted_answer)
    return errors


async def test_a_sealed_worker_cannot_reach_out_of_its_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = attempts(tmp_path)
    for name in ("unshare", "setns", "mount", "umount2", "bpf", "keyctl", "io_uring_setup"):
        calls[name] = [number(name), 0, 0, 0, 0, 0]
    errors = await errors_in(monkeypatch, True, calls)
    assert errors == dict.fromkeys(calls, errno.EPERM)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "kept"


async def test_a_sealed_worker_can_read_files(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"read": [number("openat"), AT_FDCWD, __file__, os.O_RDONLY]}
    assert await errors_in(monkeypatch, True, calls) == {"read": 0}


async def test_no_filter_keeps_an_open_worker_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = await errors_in(monkeypatch, False, attempts(tmp_path))
    assert [name for name, error in errors.items() if error == errno.EPERM] == []
    assert (tmp_path / "made").is_dir()


async def test_where_no_worker_can_be_sealed_model_text_is_refused_and_other_graders_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_process, "_COMMAND", (sys.executable, "-c", _WORKER_WITHOUT_SECCOMP))
    (tmp_path / "f.py").write_text("def f(**values): return 1.0")
    settings = {GraderKind.CUSTOM: {"directory": str(tmp_path)}}
    async with WorkerPool(1, 1000.0, settings=settings) as pool:
        assert pool.unavailable.keys() == {GraderKind.MATH, GraderKind.REASONING_GYM}
        for answer in ("4", "x+1"):  # without a worker, and in one
            task = GradingTask(GraderKind.MATH, f"\\boxed{{{answer}}}", '{"answer": "1+x"}')
            with pytest.raises(GraderUnavailableError, match="seccomp=deploy/seccomp.json"):
                await grading.grade(pool, task)
        custom = GradingTask(GraderKind.CUSTOM, "4", '{"function": "f.py:f", "ground_truth": "4"}')
        assert (await grading.grade(pool, custom)).score.verdict is Verdict.CORRECT
