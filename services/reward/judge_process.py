"""The judge worker as the service sees it: a child that is kept alive, behind a URL that stays.

States: starting -> answering -> dead -> starting ... until `stop`. The listening socket belongs to
the service and outlives the child: what is asked while a child starts waits in the socket's line,
and is answered or comes to its own time limit. What was in work when a child died ends with a
closed connection, which `graders/judge.py` takes for trouble and tries again. Callers must show a
token that is made anew with each service, so no other user of this host can ask the judge.

With a claimed device a child lives only while there is work: the first request has the device
claimed and the child started; idle it ends, its memory freed for certain, and the device is given
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from rollpacker.devices.holder import Devices, NoDevices
from rollpacker.local_stack import child
from rollpacker.local_stack.restart_policy import RestartLimits, RestartPolicy
from rollpacker.rpc.errors import UnavailableError
from rollpacker.tasks import end_tasks
from services.reward.worker_process import KEPT_ENVIRONMENT

COMPLETIONS_PATH = "/v1/chat/completions"
TOKEN_VARIABLE = "ROLLPACKER_JUDGE_TOKEN"  # noqa: S105  the name of one
MOST_BODY_BYTES = 16 << 20
_MODULE = "services.reward.judge_worker"
_BACKLOG = 1024
_KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "PYTORCH_", "HF_", "OMP_")
_FOR_EVER = RestartLimits(count=1 << 30)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeModelSettings:
    """What the child is told."""

    model: str  # directory
    device: str = "cpu"
    dtype: str = "auto"
    memory_gib: float = 0.0  # of the device, for all that the judge holds there; 0: what is free
    batch: int = 16  # sequences that are decoded together
    idle_seconds: float = 5.0  # without a request until the device's memory is given back
    timeout_seconds: float = 120.0  # after which a caller has given up
    threads: int = 1
    ends_idle: bool = False  # after idle_seconds, with a GPU that others wait for

    def missing(self) -> str:
        """Why there can be no such judge here, and the fix; empty when there can."""
        for package in ("torch", "transformers"):
            if find_spec(package) is None:
                return f"{package} is not installed: pip install 'rollpacker[judge]'"
        if not (Path(self.model) / "config.json").is_file():
            return (
                f"ROLLPACKER_REWARD_JUDGE_MODEL: {self.model} is no directory with a model"
                " (config.json); give one"
            )
        return ""


class JudgeProcess:
    """Use it as an async context manager; afterwards no process is left."""

    def __init__(self, settings: JudgeModelSettings, devices: Devices | None = None) -> None:
        """`devices`: where the child's one is claimed; None, NoDevices: it has what it has."""
        self._devices = None if isinstance(devices, NoDevices) else devices
        self._settings = replace(settings, ends_idle=self._devices is not None)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.token = secrets.token_urlsafe(24)
        self.start_count = 0

    @property
    def url(self) -> str:
        """The base URL, as of any OpenAI-compatible endpoint."""
        base = COMPLETIONS_PATH.removesuffix("/chat/completions")
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}{base}"

    @property
    def pid(self) -> int | None:
        """Of the newest child."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end_tasks(self._keeper)  # it may be cancelled more than once, so it kills nothing
        if self._process:
            await _end(self._process)
        self._listener.close()

    async def _keep_alive(self) -> None:
        policy = RestartPolicy(_FOR_EVER)
        while True:
            await self._claim()
            self._process = await self._start()
            code = await self._process.wait()
            await self._release()
            if code == 0 and self._settings.ends_idle:
                continue
            delay = policy.died(time.monotonic()) or 0.0
            _log.error("the judge ended with %d; it starts again in %.1f s", code, delay)
            await asyncio.sleep(delay)

    async def _claim(self) -> None:
        """Where the device is claimed: wait until somebody asks, then until it is given."""
        while self._devices is not None:
            await self._asked()
            try:
                await self._devices.claim(1)
            except UnavailableError as error:
                _log.warning("the judge waits: %s", error)
            else:
                return

    async def _release(self) -> None:
        while self._devices is not None:
            try:
                await self._devices.release()
            except UnavailableError as error:
                _log.warning("the judge's device: %s", error)
            else:
                return

    async def _asked(self) -> None:
        """Wait until a connection waits in the socket's line."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener.fileno(), asked.set)
        try:
            await asked.wait()
        finally:
            loop.remove_reader(self._listener.fileno())

    async def _start(self) -> asyncio.subprocess.Process:
        listener = self._listener.fileno()
        self.start_count += 1
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *(sys.executable, "-m", _MODULE, str(listener), json.dumps(asdict(self._settings))),
            stdin=asyncio.subprocess.DEVNULL,
            env={**_environment(), TOKEN_VARIABLE: self.token},
            pass_fds=(listener,),
            start_new_session=True,
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it, with whatever it started, and wait until it is gone. Repeat: no effect."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment() -> dict[str, str]:
    """No secret of the service; the variables of CUDA and its MPS are passed on."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_ENVIRONMENT or name.startswith(_KEPT_PREFIXES)
    }
