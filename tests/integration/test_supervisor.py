"""The supervisor with real child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollpacker.local_stack import StackError
from rollpacker.local_stack.lock import directory_lock
from rollpacker.local_stack.restart_policy import RestartLimits
from rollpacker.local_stack.supervisor import ProcessSpec, Supervisor

LIMITS = RestartLimits(
    count=3, window_seconds=60.0, first_delay_seconds=0.01, longest_delay_seconds=0.05
)
SLEEP = "import time; time.sleep(600)"


def python(name: str, code: str, **options: object) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-I", "-S", "-c", code), **options)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", LIMITS)
    yield supervisor
    await supervisor.stop()


async def test_a_killed_process_is_started_again(supervisor: Supervisor) -> None:
    supervisor.start(python("one", SLEEP))
    await until(lambda: "one" in supervisor.pids)
    before = supervisor.pids["one"]
    supervisor.kill("one")
    await until(lambda: supervisor.pids.get("one", before) != before)
    assert supervisor.restarts == {"one": 1}
    assert not alive(before)


async def test_a_process_that_keeps_dying_fails_the_stack_with_the_end_of_its_log(
    supervisor: Supervisor,
) -> None:
    supervisor.start(python("broken", "print('the reason'); raise SystemExit(3)"))
    with pytest.raises(StackError, match=r"broken keeps dying \(exit status 3\)") as failure:
        await supervisor.wait_failed()
    assert "the reason" in str(failure.value)
    assert str(supervisor.log_path("broken")) in str(failure.value)
    assert supervisor.restarts == {"broken": LIMITS.count}


async def test_a_stop_goes_stage_by_stage_and_waits_for_each(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    record = tmp_path / "order"
    code = (
        "import signal, time, sys\n"
        "def end(*_):\n"
        "    time.sleep({pause}); open({record!r}, 'a').write('{name} '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); open({ready!r}, 'w'); time.sleep(600)"
    )
    for name, stage, pause in (("last", 2, 0.0), ("first", 0, 0.2), ("second", 1, 0.1)):
        ready = str(tmp_path / name)
        text = code.format(pause=pause, record=str(record), name=name, ready=ready)
        supervisor.start(python(name, text, stop_stage=stage))
        await until(Path(ready).exists)
    await supervisor.stop()
    assert record.read_text().split() == ["first", "second", "last"]
    assert supervisor.pids == {}
    assert supervisor.restarts == {"first": 0, "second": 0, "last": 0}


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(ready)!r}, 'w'); {SLEEP}"
    )
    supervisor.start(python("stubborn", code, grace_seconds=0.1))
    await until(ready.exists)
    pid = supervisor.pids["stubborn"]
    await supervisor.stop()
    assert not alive(pid)


async def test_what_a_dead_process_left_behind_is_killed_before_it_is_started_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    record = tmp_path / "orphan"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"open({str(record)!r}, 'a').write(f'{{child.pid}}\\n'); child.wait()"
    )
    supervisor.start(python("parent", code))
    await until(lambda: record.exists() and record.read_text().endswith("\n"))
    orphan = int(record.read_text())
    os.kill(supervisor.pids["parent"], signal.SIGKILL)
    await until(lambda: supervisor.restarts["parent"] == 1)
    await until(lambda: not alive(orphan))


async def test_no_process_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from rollpacker.local_stack.supervisor import ProcessSpec, Supervisor

async def main():
    supervisor = Supervisor(Path({str(tmp_path)!r}))
    for name in ("one", "two"):
        supervisor.start(ProcessSpec(name, ("sleep", "600")))
    while len(supervisor.pids) < 2:
        await asyncio.sleep(0.01)
    print(*supervisor.pids.values(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(pids) == 2
    await until(lambda: not any(alive(pid) for pid in pids))


def test_a_second_stack_in_a_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        held.enter_context(directory_lock(tmp_path))
        with pytest.raises(StackError, match=f"held by process {os.getpid()} since"):
            held.enter_context(directory_lock(tmp_path))
    with directory_lock(tmp_path):
        pass
