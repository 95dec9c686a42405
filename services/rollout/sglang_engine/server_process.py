"""One SGLang server process: started, watched, killed. It is never started twice.

It leads a process group of its own and dies with this service, however that ends; its schedulers
die with it. Killing means the whole group: half a server is no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollpacker.local_stack import child

_TAIL_LINES = 20
_POLL_SECONDS = 0.25


class ServerProcessError(Exception):
    """The server did not come up; the message holds the end of its log."""


class ServerProcess:
    """A running server. Create it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ServerProcess:
        """Start it; output is appended to `log`. Raises ServerProcessError."""
        own = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()))
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *own,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerProcessError(f"SGLang cannot be started: {error}") from error
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.returncode is not None

    async def wait(self) -> str:
        """Wait until it ends; returns how, with the end of its log."""
        code = await self._process.wait()
        self._signal_group()
        status = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"SGLang ended ({status}); {self.tail()}"

    async def kill(self) -> None:
        """End it and everything that it started."""
        self._signal_group()
        await self._process.wait()

    def tail(self) -> str:
        """Where the log is, and its last lines."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = "\n".join(f"  {line[:300]}" for line in text.splitlines()[-_TAIL_LINES:])
        return f"the end of its log {self._log}:\n{lines}"

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def installed_version(python: str, environment: Mapping[str, str]) -> str:
    """The version of SGLang that an interpreter would run. Raises ServerProcessError."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            code,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
        )
    except OSError as error:
        raise ServerProcessError(f"{python} cannot be run: {error}") from error
    output, errors = await process.communicate()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no output"]
        raise ServerProcessError(
            f"{python} has no SGLang ({lines[-1]}); name one that has it: sglang_python"
        )
    return output.decode().strip()
