"""Fake GPUs for machines without: a memory meter in a directory, no device and no computing.

    devices.json            bytes of each device by name
    lock                    held while anything below changes
    DEVICE/PROCESS          what one process holds there; locked by it as long as it lives
    history.jsonl           every change, in order: device, process, bytes, and who held it after

What a process holds is what it says (`hold`), and is gone with the process, as with a driver: the
lock of a dead one is free. More than fits raises, as CUDA does. The history is what tests read:
whether two processes ever held one device at the same time.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rollpacker.devices.memory import Memory, MeterError, chosen

_numbers = itertools.count()
_DEVICES, _LOCK, HISTORY = "devices.json", "lock", "history.jsonl"


class FakeMemoryError(RuntimeError):
    """A fake device is full."""


def make_fake_gpus(directory: Path, count: int, size: int) -> None:
    """So many devices, fake-0 and so on, of `size` bytes."""
    directory.mkdir(parents=True)
    for index in range(count):
        (directory / f"fake-{index}").mkdir()
    (directory / _LOCK).touch()
    (directory / _DEVICES).write_text(json.dumps({f"fake-{i}": size for i in range(count)}))


class FakeMeter:
    """See the module; one of a process."""

    def __init__(self, directory: Path, wanted: Sequence[str] = ()) -> None:
        self._directory = directory
        self._wanted = tuple(wanted)
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._own: tuple[str, ...] = ()
        self._size = 0
        self._files: dict[str, IO[bytes]] = {}  # what this process says, by device; kept locked

    def memory(self) -> Mapping[str, Memory]:
        """See Meter."""
        sizes = self._sizes()
        with self._locked():
            held = {device: self._held(device) for device in sizes}
        found = {d: Memory(size - sum(held[d].values()), size) for d, size in sizes.items()}
        return chosen(found, self._wanted)

    def keep_to(self, devices: Sequence[str]) -> None:
        """See Meter. What was held elsewhere is let go of."""
        size, self._own = self._size, tuple(devices)
        with self._locked():
            for device in self._files.keys() - set(devices):
                self._write(device, 0)
        self.hold(size)

    def hold(self, size: int) -> None:
        """See Meter. Raises FakeMemoryError."""
        self._size = size
        with self._locked():
            for device in self._own:
                others = sum(self._held(device).values()) - self._said(device)
                total = self._sizes()[device]
                if others + size > total:
                    raise FakeMemoryError(f"{device}: {size} bytes wanted, {total - others} free")
                self._write(device, size)

    def _write(self, device: str, size: int) -> None:
        if device not in self._files:
            own = (self._directory / device / self._name).open("w+b")
            fcntl.flock(own, fcntl.LOCK_EX)
            self._files[device] = own
        if self._said(device) == size:
            return
        file = self._files[device]
        file.seek(0)
        file.truncate()
        file.write(str(size).encode())
        file.flush()
        holders = {name: held for name, held in self._held(device).items() if held}
        line = {"device": device, "process": self._name, "bytes": size, "holders": holders}
        with (self._directory / HISTORY).open("a") as history:
            history.write(json.dumps(line) + "\n")

    def _said(self, device: str) -> int:
        file = self._files.get(device)
        if file is None:
            return 0
        file.seek(0)
        return int(file.read() or 0)

    def _held(self, device: str) -> dict[str, int]:
        """Bytes by process, of those that live."""
        held = {}
        for path in (self._directory / device).iterdir():
            if path.name == self._name and device in self._files:
                held[path.name] = self._said(device)
            elif _is_locked(path):
                held[path.name] = int(path.read_text() or 0)
        return held

    def _sizes(self) -> Mapping[str, int]:
        path = self._directory / _DEVICES
        try:
            sizes: dict[str, int] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise MeterError(f"fake_devices: {path} cannot be read: {error}") from error
        return sizes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._directory / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_locked(path: Path) -> bool:
    """Whether the process that wrote it lives."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
