"""How much memory of each GPU is free: asked of the driver, which sees every process.

A `Meter` measures the devices that a process may claim, keeps the process to those that it was
given, and is told what the process holds there. A driver knows the last by itself; `fake` needs it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_MIB = 1024 * 1024
_SECONDS = 20
_QUERY = (
    "nvidia-smi",
    "--query-gpu=uuid,memory.free,memory.total",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one device, in bytes."""

    free: int
    total: int


class MeterError(Exception):
    """The devices cannot be measured, or not the ones that are asked for; the message says why."""


class Meter(Protocol):
    """The devices that this process may use."""

    def memory(self) -> Mapping[str, Memory]:
        """By name, in the driver's order. Raises MeterError."""
        ...

    def keep_to(self, devices: Sequence[str]) -> None:
        """This process, and what it starts from now on, uses these devices alone."""
        ...

    def hold(self, size: int) -> None:
        """This process holds so many bytes on each of its devices from now on."""
        ...


class NvidiaMeter:
    """GPUs by UUID, as nvidia-smi shows them. No CUDA context may exist before `keep_to`."""

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        """`wanted`: indices or UUIDs, of those that nvidia-smi shows; empty: all."""
        self._wanted = tuple(wanted)

    def memory(self) -> Mapping[str, Memory]:
        """See Meter."""
        try:
            said = subprocess.run(
                _QUERY, check=True, capture_output=True, text=True, timeout=_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise MeterError(f"nvidia-smi does not tell the GPUs' memory: {error}") from error
        found = dict(_gpu(line) for line in said.stdout.splitlines() if line.strip())
        return chosen(found, self._wanted)

    def keep_to(self, devices: Sequence[str]) -> None:
        """See Meter."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    def hold(self, size: int) -> None:
        """The driver knows."""


def chosen(found: Mapping[str, Memory], wanted: Sequence[str]) -> Mapping[str, Memory]:
    """Those that are wanted by index or name; all when none is. Raises MeterError."""
    if not wanted:
        return found
    names = list(found)
    known = {**{str(index): name for index, name in enumerate(names)}, **{n: n for n in names}}
    missing = [each for each in wanted if each not in known]
    if missing:
        raise MeterError(f"devices: there is no {', '.join(missing)}; there are {', '.join(names)}")
    kept = {known[each] for each in wanted}
    return {name: memory for name, memory in found.items() if name in kept}


def _gpu(line: str) -> tuple[str, Memory]:
    uuid, free, total = line.split(", ")
    return uuid, Memory(int(free) * _MIB, int(total) * _MIB)
