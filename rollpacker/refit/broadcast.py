"""The files of a version over torch.distributed: one sender, rank 0, and any number of receivers.

    JoinBroadcast, JoinBroadcast, ... --a moment--> the group is closed; places are given out
    sender: store, group, files in order        receivers: store, group, the same files in order

The group is made for one version and belongs to nothing else, so a trainer whose ranks have a
group of their own is not touched. Bytes land in mapped files without a copy in between. Every
operation has the same deadline on each end; a member that stalls or leaves ends it for all.

gloo and the store neither encrypt nor ask who is there: both ends must allow it by naming a host.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_dist: Any = torch.distributed  # it exports little of what it documents to type checkers
_BUCKET_BYTES = 64 << 20  # of one operation
_log = logging.getLogger(__name__)


class BroadcastError(Exception):
    """The broadcast ended early; another carrier may do."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member's place in a group."""

    store_host: str
    store_port: int
    rank: int  # 0: the sender
    world_size: int
    timeout_seconds: float


class Broadcaster:
    """The sender's side: gathers receivers and serves them; lives in one event loop."""

    def __init__(self, host: str, timeout_seconds: float, gather_seconds: float = 0.5) -> None:
        """`host`: of this machine, as receivers reach it."""
        self._host = host
        self._timeout = timeout_seconds
        self._gather = gather_seconds
        self._open: dict[Path, list[asyncio.Future[Place]]] = {}  # who waits, by directory
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, directory: Path, names: Sequence[str]) -> Place:
        """A receiver's place in the next broadcast of `names` in `directory`."""
        waiting = self._open.setdefault(directory, [])
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting.append(place)
        if len(waiting) == 1:
            task = asyncio.create_task(self._serve(directory, tuple(names)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await place

    async def _serve(self, directory: Path, names: Sequence[str]) -> None:
        await asyncio.sleep(self._gather)
        waiting = [place for place in self._open.pop(directory) if not place.done()]
        size = len(waiting) + 1
        try:
            store = _store(self._host, 0, self._timeout, is_master=True)
        except BroadcastError as error:
            for future in waiting:
                future.set_exception(error)
            return
        for rank, future in enumerate(waiting, start=1):
            future.set_result(Place(self._host, store.port, rank, size, self._timeout))
        own = Place(self._host, store.port, 0, size, self._timeout)
        try:
            await asyncio.to_thread(_send, store, own, [directory / name for name in names])
        except (BroadcastError, OSError) as error:
            _log.warning("the broadcast of %s to %d hosts ended: %s", directory, size - 1, error)


def receive(place: Place, host: str, files: Sequence[tuple[Path, int]]) -> None:
    """Fill files of known sizes; blocks. Raises BroadcastError.

    `host`: of this machine, as the other members reach it.
    """
    store = _store(place.store_host, place.store_port, place.timeout_seconds, is_master=False)
    group = _group(store, place, host)
    for path, size in files:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(size)
            with _mapped(file.fileno(), size, mmap.ACCESS_WRITE) as content:
                _broadcast(group, content)


def _store(host: str, port: int, seconds: float, *, is_master: bool) -> Any:
    try:
        return _dist.TCPStore(
            host, port, None, is_master, timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:  # every error of torch.distributed is one
        raise BroadcastError(str(error)) from error


def _send(store: Any, place: Place, paths: Sequence[Path]) -> None:
    group = _group(store, place, place.store_host)
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            with _mapped(file.fileno(), size, mmap.ACCESS_COPY) as content:
                _broadcast(group, content)


def _group(store: Any, place: Place, host: str) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=place.timeout_seconds)
    try:
        options._devices = [gloo.create_device(hostname=host)]
        return gloo(_dist.PrefixStore("weights", store), place.rank, place.world_size, options)
    except RuntimeError as error:
        raise BroadcastError(str(error)) from error


def _broadcast(group: Any, content: Tensor) -> None:
    try:
        for bucket in torch.split(content, _BUCKET_BYTES):
            group.broadcast(bucket, 0).wait()
    except RuntimeError as error:
        raise BroadcastError(str(error)) from error


@contextmanager
def _mapped(descriptor: int, size: int, access: int) -> Iterator[Tensor]:
    """A file as bytes in memory, [size] uint8."""
    if not size:
        yield torch.empty(0, dtype=torch.uint8)
        return
    mapping = mmap.mmap(descriptor, size, access=access)
    try:
        yield torch.frombuffer(mapping, dtype=torch.uint8)
    finally:
        mapping.flush()
