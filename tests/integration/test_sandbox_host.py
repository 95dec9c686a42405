# ruff: noqa: E501  programs read better on their lines
"""Hostile programs, and the host afterwards: no process, file, socket or descriptor is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollpacker.types import GraderKind
from services.reward.graders.code import CodeGrader
from services.reward.graders.grader import GraderUnavailableError, GradingTask
from services.reward.sandbox import canary
from services.reward.sandbox.command import SandboxSettings, SandboxUnavailableError
from services.reward.worker_pool import WorkerPool
from tests.sandbox_support import descendants, new_grader, open_descriptors, verdict

# Every way that this kernel knows to get another process or to keep one; run in the sandbox only,
# after the canary has proved there that fork and exec are denied.
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nthreading.stack_size(65536)\n"
    "while True: threading.Thread(target=time.sleep, args=[99], daemon=True).start()",
    "a daemon": "import os\nos.fork() and os._exit(0)\nos.setsid()\nwhile True: pass",
    "a listener": "import socket\ns = socket.socket()\ns.bind(('', 0))\ns.listen()\ninput()",
    "files": "for i in range(10**6): open(f'/tmp/{i}', 'w').write('x' * 9999)",
    "files of the host": "import os\nfor p in ('/x', '/usr/x', '/dev/x', '/runner/x', '/packages/x'):\n"
    "    open(p, 'w').write('x')",
    "ignored signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "memory in threads": "import threading\ndef f():\n    a = []\n    while True: a.append(bytearray(1 << 24))\n"
    "for _ in range(8): threading.Thread(target=f).start()",
    "a new namespace": "import ctypes\nwhile ctypes.CDLL(None).unshare(0x10020000): pass",
}  # fmt: skip
DOUBLE = [["21", "42"]]


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    made = new_grader(0.5)
    yield made
    made.end()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_leaves_nothing_on_the_host(grader: CodeGrader, name: str) -> None:
    grader.end()
    before = descendants(os.getpid()), open_descriptors(), set(os.listdir("/tmp"))
    assert verdict(grader, HOSTILE[name], tests=DOUBLE) != "CORRECT"
    after = descendants(os.getpid()), open_descriptors(), set(os.listdir("/tmp"))
    assert after[:2] == before[:2]
    assert not [path for path in after[2] - before[2] if path.isdigit()]
    for path in ("/x", "/usr/x", "/dev/x"):
        assert not Path(path).exists()
    assert verdict(grader, "print(2 * int(input()))", tests=DOUBLE) == "CORRECT"


def test_neighbours_are_right_while_bombs_run() -> None:
    graders = [new_grader(1.0) for _ in range(3)]
    bombs, neighbour = graders[:2], graders[2]
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(verdict, bomb, HOSTILE[name], tests=DOUBLE)
            for bomb, name in zip(bombs, ("fork bomb", "thread bomb"), strict=True)
        ]
        for _ in range(5):
            assert verdict(neighbour, "print(2 * int(input()))", tests=DOUBLE) == "CORRECT"
        assert "CORRECT" not in [each.result() for each in running]
    for each in graders:
        each.end()


def test_hundreds_of_mixed_programs_leave_no_descriptor_and_no_process(
    grader: CodeGrader,
) -> None:
    grader.end()
    before = descendants(os.getpid()), open_descriptors()
    programs = ["print(42)", "print(1)", "raise ValueError", "import os\nos.fork()", "def f(:"]
    for number in range(100):
        verdict(grader, programs[number % len(programs)], tests=DOUBLE)
    assert (descendants(os.getpid()), open_descriptors()) == before


async def test_workers_killed_at_any_moment_of_a_start_leave_no_sandbox() -> None:
    code = (
        "from tests.sandbox_support import new_grader; g = new_grader(); g.end(); print(1, flush=1)"
    )
    code += "; [(g.prepare(), g.end()) for _ in range(10**6)]"
    for delay in range(8):
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        assert worker.stdout
        await worker.stdout.readline()
        await asyncio.sleep(delay * 0.005)
        sandboxed = descendants(worker.pid)
        worker.kill()
        await worker.wait()
        async with asyncio.timeout(60):
            while any(_runs(pid) for pid in sandboxed):
                await asyncio.sleep(0.05)


def _descendants_of_last_worker(pool: WorkerPool) -> list[int]:
    """Of the open worker, which a slot starts after the sealed one."""
    return descendants(pool.worker_pids[-1])


async def test_a_worker_killed_in_the_middle_takes_its_sandbox_along_and_the_rest_goes_on() -> None:
    limits = {"timeouts": {"min_seconds": 60.0, "max_seconds": 60.0}}
    async with WorkerPool(1, 5.0, settings={GraderKind.CODE: limits}) as pool:
        endless = GradingTask(
            GraderKind.CODE, "```python\nwhile True: pass\n```", json.dumps({"tests": DOUBLE})
        )
        lost = asyncio.create_task(pool.grade(endless))
        for _ in range(2):  # its first try and the repeat
            async with asyncio.timeout(120):
                while len(sandboxed := _descendants_of_last_worker(pool)) < 4:
                    await asyncio.sleep(0.05)
            os.kill(pool.worker_pids[-1], signal.SIGKILL)
            async with asyncio.timeout(120):
                while any(_runs(pid) for pid in sandboxed):
                    await asyncio.sleep(0.05)
        with pytest.raises(Exception, match="ended with -9"):
            await lost
        right = GradingTask(GraderKind.CODE, "```python\nprint(42)\n```", endless.reference_json)
        assert (await pool.grade(right)).score.reward == 1.0


def test_without_bubblewrap_nothing_is_run_and_the_error_names_the_knob() -> None:
    grader = CodeGrader()
    with pytest.raises(GraderUnavailableError, match="ROLLPACKER_REWARD_SANDBOX_BWRAP"):
        grader.load({"sandbox": {"bwrap": "/nowhere/bwrap"}})


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "uid map: Permission"),
        ("exit 0", "no reason given"),
    ],
)
def test_a_bubblewrap_that_makes_no_sandbox_is_refused_with_what_it_said(
    tmp_path: Path, script: str, what: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    with pytest.raises(SandboxUnavailableError, match=what):
        canary.check(SandboxSettings(bwrap=str(fake)))


def _runs(pid: int) -> bool:
    """Alive and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
