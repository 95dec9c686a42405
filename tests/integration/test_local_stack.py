"""The local stack with its real services and a real Redis, as `rollpacker up` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from rollpacker.local_stack.ports import free_port

ROLLPACKER = str(Path(sys.executable).with_name("rollpacker"))
NAMES = ["coordinator", "redis", "reward-0", "rollout-0", "trainer-0"]
PATIENCE_SECONDS = 240


class Up:
    """A `rollpacker up` in a directory."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.port = free_port()
        command = (ROLLPACKER, "up", "--port", str(self.port), *options)
        command += ("--directory", str(directory), "--runs", str(directory / "runs"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    @property
    def state(self) -> dict[str, Any]:
        path = self.directory / "stack.json"
        return json.loads(path.read_text()) if path.exists() else {"processes": {}}

    @property
    def pids(self) -> dict[str, int]:
        return {name: process["pid"] for name, process in self.state["processes"].items()}

    def workers(self) -> list[str]:
        """Worker ids that the coordinator lists."""
        command = (ROLLPACKER, "workers", "--json", "--coordinator", f"127.0.0.1:{self.port}")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return [json.loads(line)["worker_id"] for line in result.stdout.splitlines()]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.rest()
            assert time.monotonic() < deadline, self.state
            time.sleep(0.05)

    def until_line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"ended with {self.process.wait()} before saying {start!r}")

    def rest(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:  # grows while it is walked
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One stack for the tests of this module, in their order; the last of them ends it."""
    stack = Up(tmp_path_factory.mktemp("stack"))
    stack.until_line("coordinator: 127.0.0.1")
    yield stack
    stack.end()


def test_everything_is_up_and_registered_when_the_stack_says_so(up: Up) -> None:
    assert sorted(up.pids) == NAMES
    assert up.workers() == ["rollout-0", "reward-0", "trainer-0"]
    assert up.state["coordinator_address"] == f"127.0.0.1:{up.port}"
    with redis.Redis.from_url(up.state["redis_url"]) as client:
        assert client.ping()
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    for name in NAMES:
        assert (up.directory / "logs" / f"{name}.log").stat().st_size > 0


def test_a_second_stack_in_the_directory_is_told_who_holds_it(up: Up) -> None:
    second = Up(up.directory)
    message = second.rest()
    assert second.process.wait() == 1
    assert f"held by process {up.process.pid} since" in message
    second.end()


def test_every_process_that_is_killed_comes_back_at_its_address(up: Up) -> None:
    before = up.state["processes"]
    for name in NAMES:
        os.kill(before[name]["pid"], signal.SIGKILL)
    up.until(
        lambda: (
            sorted(up.pids) == NAMES
            and not set(up.pids.values()) & {process["pid"] for process in before.values()}
        )
    )
    after = up.state["processes"]
    for name in NAMES:
        assert after[name]["address"] == before[name]["address"]
        assert after[name]["restarts"] >= 1
    up.until(lambda: len(up.workers()) == 3)


def test_an_interrupt_ends_everything_and_keeps_what_redis_holds(up: Up) -> None:
    with redis.Redis.from_url(up.state["redis_url"]) as client:
        client.set("kept", "yes")
    processes = tree(up.process.pid)
    assert len(processes) > len(NAMES)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(PATIENCE_SECONDS) == 130, up.rest()
    assert not any(alive(pid) for pid in processes)
    assert up.state["processes"] == {}
    assert b"kept" in b"".join(p.read_bytes() for p in up.directory.glob("redis/appendonlydir/*"))


def test_no_process_outlives_a_stack_that_was_killed(tmp_path: Path) -> None:
    stack = Up(tmp_path, "--trainers", "2")
    stack.until(lambda: sorted(stack.pids) == NAMES)
    stack.until(lambda: len(tree(stack.pids["trainer-0"])) >= 3)  # torchrun and its two ranks
    processes = tree(stack.process.pid)
    stack.end()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(alive(pid) for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_that_is_taken_is_named(up: Up, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        command = (ROLLPACKER, "up", "--port", str(port), "--directory", str(tmp_path))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"127.0.0.1:{port} is taken" in result.stderr
