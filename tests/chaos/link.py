"""A network between two processes that can be cut: a TCP proxy with three states.

*Open*: bytes go through. *Refused*: connections are reset and new ones refused, as when a host
is up and its service is not. *Silent*: nothing arrives and nothing is refused, as when a cable is
out; what was on its way arrives when the link is open again. Bytes are never changed, lost within
a connection that lives, or told twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import Callable
from typing import Self

from rollpacker.local_stack.ports import free_port

_CHUNK_BYTES = 1 << 16
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Cut(enum.Enum):
    """How a link is cut."""

    REFUSED = "refuse"
    SILENT = "silence"


class Link:
    """Listens at `address` and passes on to a target, "host:port" or "unix:///path"."""

    def __init__(self, target: Callable[[], str]) -> None:
        """`target` is asked at each connection: it may not be known yet."""
        self._target = target
        self._port = free_port()
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._refuse()

    async def cut(self, how: Cut) -> None:
        """Cut the link; it must be open."""
        if how is Cut.REFUSED:
            await self._refuse()
        else:
            self._flowing.clear()

    async def open(self) -> None:
        """Let bytes through again. Repeat: no effect."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; a task of its own, which asyncio made."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._flowing.wait()
            with contextlib.suppress(OSError):
                await self._pass_on(reader, writer)
        except asyncio.CancelledError:
            _make_abrupt(writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await _connect(self._target())
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, target_writer))
                both.create_task(self._pump(target_reader, writer))
            await writer.drain()
        finally:
            target_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Pass bytes on until either side is gone."""
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
            sink.write_eof()


def _make_abrupt(writer: asyncio.StreamWriter) -> None:
    """Have the end of a connection be a reset."""
    linger_for_nothing = struct.pack("ii", 1, 0)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)


async def _connect(target: str) -> Streams:
    if target.startswith("unix://"):
        return await asyncio.open_unix_connection(target.removeprefix("unix://"))
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))
