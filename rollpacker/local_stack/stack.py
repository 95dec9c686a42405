"""The local stack: a real Redis and the four services as child processes of this one.

A directory holds everything: `redis/` (data), `weights/`, `checkpoints/`, `logs/<process>.log` and
`stack.json` (addresses and process ids, rewritten at every change). Addresses are chosen once and
kept while the stack lives. Starting goes Redis, then everything else at once, then a wait until
every worker is registered; stopping goes coordinator, workers, Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollpacker.local_stack import ports, readiness, services
from rollpacker.local_stack.lock import directory_lock, make_directory
from rollpacker.local_stack.redis_server import RedisServerError, redis_server
from rollpacker.local_stack.restart_policy import RestartLimits
from rollpacker.local_stack.services import StackLayout, StackSize
from rollpacker.local_stack.supervisor import StackError, Supervisor
from rollpacker.rpc import client

_POLL_SECONDS = 0.1
_WAIT_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


class LocalStack:
    """An asynchronous context manager: services are up inside, and gone afterwards.

    Raises StackError where a process cannot be started or kept alive.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rollouts: int = 1,
        rewards: int = 1,
        trainers: int = 1,
        run_directory: Path | None = None,
        coordinator_port: int | None = None,
        rollout_settings: Mapping[str, object] | None = None,
        links: Mapping[str, str] | None = None,
        start_seconds: float = 180.0,
        limits: RestartLimits | None = None,
    ) -> None:
        """`run_directory` (default: `directory`/runs) is where runs leave their outputs.

        `rollout_settings`: settings of the rollout replicas, by field (`engine`: `sglang`).
        `links`: where the others reach a process, by its name, if not at its own address; for
        "redis" a URL. Whoever gives one keeps a proxy there.
        """
        self._size = StackSize(rollouts, rewards, trainers)
        self._rollout_settings = rollout_settings or {}
        self._links = links or {}
        self._start_seconds = start_seconds
        self._limits = limits
        self._coordinator_port = coordinator_port
        self._directory = directory.resolve()
        self._run_directory = (run_directory or directory / "runs").resolve()
        self._exit = contextlib.AsyncExitStack()
        self._supervisor: Supervisor | None = None
        self._layout: StackLayout | None = None
        self._redis_url = ""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as entered:
            entered.enter_context(directory_lock(self._directory))
            self._layout = self._choose_layout()
            self._supervisor = Supervisor(self._layout.logs, self._limits, self._write_state)
            entered.push_async_callback(self._supervisor.stop)
            await self._start()
            self._exit = entered.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(kind, error, traceback)

    @property
    def supervisor(self) -> Supervisor:
        """Keeps the processes alive; from the start of the context on."""
        assert self._supervisor is not None, "the stack has not been entered"
        return self._supervisor

    @property
    def layout(self) -> StackLayout:
        """Addresses and directories; from the start of the context on."""
        assert self._layout is not None, "the stack has not been entered"
        return self._layout

    @property
    def coordinator_address(self) -> str:
        return self.layout.coordinator_address

    @property
    def redis_url(self) -> str:
        return self._redis_url

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name (redis, coordinator, rollout-0, ...), of those that run now."""
        return self.supervisor.pids

    def kill(self, name: str) -> None:
        """kill -9 one process; it is started again."""
        self.supervisor.kill(name)

    def kill_all(self) -> None:
        """kill -9 everything, for those who cannot wait for an orderly stop; no effect outside."""
        if self._supervisor is not None:
            self._supervisor.kill_all()

    async def wait_ready(self) -> None:
        """Wait until the coordinator serves and every worker is registered.

        Raises StackError when the stack fails, or when that takes longer than `start_seconds`.
        """
        workers = self._size.worker_names()
        async with client.open_channel(self.coordinator_address) as channel:

            async def not_ready() -> list[str]:
                return await readiness.not_ready(channel, services.COORDINATOR, workers)

            await self._wait_until_none(not_ready)

    async def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; should the stack fail meanwhile, cancel it and raise StackError."""
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.supervisor.wait_failed())
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            self.supervisor.check()
            await task
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    def _choose_layout(self) -> StackLayout:
        chosen: dict[str, int] = {}
        for name in services.port_names(self._size):
            chosen[name] = ports.free_port(chosen.values())
        if (port := self._coordinator_port) is not None:
            if not ports.is_free(port):
                raise StackError(f"127.0.0.1:{port} is taken; give the coordinator another port")
            chosen[services.COORDINATOR] = port
        return StackLayout(self._directory, self._run_directory, chosen, self._links)

    async def _start(self) -> None:
        try:
            server = redis_server(self._directory / "redis")
        except RedisServerError as error:
            raise StackError(str(error)) from error
        self._redis_url = server.url
        for directory in (self.layout.weights, self.layout.checkpoints, self._run_directory):
            make_directory(directory)

        async def not_ready() -> list[str]:
            return [] if await readiness.redis_answers(server.url) else [services.REDIS]

        self.supervisor.start(services.redis_spec(server))
        await self._wait_until_none(not_ready)
        redis_url = self._links.get(services.REDIS, server.url)
        specs = services.service_specs(self._size, self.layout, redis_url, self._rollout_settings)
        for spec in specs:
            self.supervisor.start(spec)
        await self.wait_ready()

    async def _wait_until_none(self, not_ready: Callable[[], Awaitable[list[str]]]) -> None:
        start = last_log = time.monotonic()
        while missing := await not_ready():
            self.supervisor.check()
            now = time.monotonic()
            if now - start > self._start_seconds:
                raise StackError(
                    f"{missing[0]} is not ready after {self._start_seconds:.0f} s;"
                    f" {self.supervisor.tail(missing[0])}"
                )
            if now - last_log > _WAIT_LOG_SECONDS:
                last_log = now
                _log.warning("waiting for %s since %.0f s", ", ".join(missing), now - start)
            await asyncio.sleep(_POLL_SECONDS)

    def _write_state(self) -> None:
        layout, supervisor = self.layout, self.supervisor
        restarts = supervisor.restarts
        state = {
            "pid": os.getpid(),
            "coordinator_address": layout.coordinator_address,
            "redis_url": self._redis_url,
            "run_directory": str(layout.run_directory),
            "processes": {
                name: {
                    "pid": pid,
                    "address": layout.address(name) if name in layout.ports else self._redis_url,
                    "log": str(supervisor.log_path(name)),
                    "restarts": restarts[name],
                }
                for name, pid in supervisor.pids.items()
            },
        }
        path = layout.directory / "stack.json"
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        aside.replace(path)
