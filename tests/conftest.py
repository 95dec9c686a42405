"""Fixtures that any test may use. Servers are real ones; each test gets its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis  # loaded before any thread: see CPython gh-106905
import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from rollpacker.local_stack.redis_server import redis_server as server_for

os.environ.setdefault("OMP_NUM_THREADS", "1")
# How fast an example runs says something about the machine, nothing about the code.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


class RunningRedis:
    """A real server with an append-only file, which a test may kill and start again."""

    def __init__(self, directory: Path) -> None:
        self._server = server_for(directory)
        self._log = directory / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self._server.url

    def start(self) -> None:
        """Start on the same data and socket; returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._server.command, stdout=log, stderr=log)
        with redis.Redis.from_url(self.url) as client:
            while not _answers(client):
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.005)

    def kill(self) -> None:
        """kill -9; `start` brings it back with its data."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
        return False


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RunningRedis]:
    """A real, empty Redis-protocol server on a unix socket: `.url`, `.kill()`, `.start()`."""
    server = RunningRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RunningRedis) -> str:
    """URL of a real, empty server."""
    return redis_server.url


@pytest.fixture
async def redis_client(redis_server: RunningRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """An asyncio client (bytes in and out) of a real, empty server; outlives a restart of it."""
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.01), retries=20)
    client = redis.asyncio.Redis.from_url(redis_server.url, retry=retry)
    yield client
    await client.aclose()
