"""A server that was seen to serve: right version, proven weights, seeds probed.

`bring_up` launches or attaches, and returns only such a server; nobody ever holds another one.
It is *lost* when its process ends, when it no longer answers, or when its scheduler is silent
although responses run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rollpacker.local_stack.ports import free_port
from services.rollout.sglang_engine import launch, served_model
from services.rollout.sglang_engine.client import (
    SglangClient,
    SglangGoneError,
    SglangLoad,
    check_version,
)
from services.rollout.sglang_engine.launch import SglangOptions
from services.rollout.sglang_engine.replay_probe import honours_seeds
from services.rollout.sglang_engine.served_model import ModelDirectory
from services.rollout.sglang_engine.server_process import (
    ServerProcess,
    ServerProcessError,
    installed_version,
)

_POLL_SECONDS = 0.5
_WATCH_SECONDS = 1.0
_MISSED_ANSWERS = 5  # in a row, until an attached server counts as lost
_numbers = itertools.count()
_log = logging.getLogger(__name__)


class WeightsNotProvenError(Exception):
    """What the server holds is not what the files hold."""


def _new_place(directory: Path) -> Path:
    return directory / f"model-{next(_numbers)}"


class SglangServer:
    """One server and the weights that it serves."""

    def __init__(
        self,
        options: SglangOptions,
        directory: Path,
        client: SglangClient,
        process: ServerProcess | None,
        tensor_parallel: int,
    ) -> None:
        self.client = client
        self.tensor_parallel = tensor_parallel
        self.replays_by_seed = False
        self.load = SglangLoad(0, 0, 0, 0, 0)
        self._options = options
        self._directory = directory
        self._process = process
        self._shown = directory  # what the server was shown last, below `directory`

    @property
    def pid(self) -> int:
        """Process id of a launched server; 0 for an attached one."""
        return self._process.pid if self._process else 0

    @classmethod
    async def bring_up(
        cls, options: SglangOptions, directory: Path, model: ModelDirectory, tensor_parallel: int
    ) -> SglangServer:
        """Launch a server with the weights of `model`, or attach and load them there.

        `directory` holds logs and what the server is shown. Raises ServerProcessError,
        UnsupportedVersionError, WeightsNotProvenError, SglangGoneError, SglangRefusedError.
        """
        shown = served_model.show(model, _new_place(directory))
        process = None
        url = options.url
        if not url:
            environment = launch.environment(options, tensor_parallel)
            check_version(await installed_version(options.python, environment))
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = launch.command(options, shown, port, tensor_parallel)
            process = await ServerProcess.start(command, environment, directory / "sglang.log")
        server = cls(options, directory, SglangClient(url), process, tensor_parallel)
        server._shown = shown
        try:
            await server._prove(model)
        except BaseException:
            await server.close()
            raise
        return server

    async def swap(self, model: ModelDirectory) -> None:
        """Load other weights of the same architecture in place; nothing may run.

        After an error the server's weights are unknown.
        """
        before, self._shown = self._shown, served_model.show(model, _new_place(self._directory))
        await self.client.update_weights_from_disk(str(self._shown))
        await self._check_weights(model)
        shutil.rmtree(before)

    async def lost(
        self, responses_run: Callable[[], bool], last_token_at: Callable[[], float]
    ) -> str:
        """Wait until the server is lost; returns why. Keeps `load` fresh meanwhile."""
        ended = asyncio.create_task(self._process.wait()) if self._process else None
        try:
            missed = 0
            while True:
                if ended is None:
                    await asyncio.sleep(_WATCH_SECONDS)
                elif (await asyncio.wait([ended], timeout=_WATCH_SECONDS))[0]:
                    return ended.result()
                try:
                    self.load = await self.client.loads()
                    missed = 0
                except SglangGoneError as error:
                    missed += 1
                    if missed >= _MISSED_ANSWERS:
                        return str(error)
                silent = time.monotonic() - last_token_at()
                silent_too_long = responses_run() and silent > self._options.silence_seconds
                if silent_too_long and not await self.client.is_healthy():
                    return f"the scheduler of SGLang has been silent for {silent:.0f} s"
        finally:
            if ended is not None:
                ended.cancel()

    async def kill(self) -> None:
        """End a launched server; what it was asked ends with SglangGoneError."""
        if self._process is not None:
            await self._process.kill()

    async def close(self) -> None:
        """Kill a launched server; leave an attached one."""
        await self.kill()
        await self.client.close()

    async def _prove(self, model: ModelDirectory) -> None:
        info = await self._until_ready()
        check_version(str(info["version"]))
        if self._process is None:
            await self.client.update_weights_from_disk(str(self._shown))
        await self._check_weights(model)
        name = f"probe-{next(_numbers):018d}"
        self.replays_by_seed = await honours_seeds(self.client, model.vocabulary, name)
        self.load = await self.client.loads()
        _log.info(
            "SGLang %s at %s serves %s; replays by seed: %s",
            info["version"],
            self.client.url,
            model.path,
            self.replays_by_seed,
        )

    async def _until_ready(self) -> dict[str, object]:
        deadline = time.monotonic() + self._options.start_seconds
        while not await self.client.is_ready():
            if self._process is not None and self._process.ended:
                raise ServerProcessError(await self._process.wait())
            if time.monotonic() > deadline:
                end = f"; {self._process.tail()}" if self._process else ""
                raise ServerProcessError(
                    f"SGLang at {self.client.url} is not ready after"
                    f" {self._options.start_seconds:.0f} s{end}"
                )
            await asyncio.sleep(_POLL_SECONDS)
        return await self.client.server_info()

    async def _check_weights(self, model: ModelDirectory) -> None:
        """On one CPU rank every parameter is checked; elsewhere SGLang's word is taken."""
        if not self._options.on_cpu or self.tensor_parallel > 1:
            return
        (reported,) = await self.client.checksums()
        wrong = await asyncio.to_thread(
            served_model.differing_parameters, model, self._options.dtype, reported
        )
        if wrong:
            raise WeightsNotProvenError(
                f"SGLang holds other weights than {model.path}: {len(wrong)} parameters differ,"
                f" first {wrong[0]}"
            )
