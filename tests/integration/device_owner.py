"""A process that takes turns on fake GPUs: `python -m tests.integration.device_owner ...`.

The fake GPU is a directory: each process that has memory on a device writes how much into a file of
its own, and what a dead process had is free again, as with a driver. Commands come line by line on
standard input; each is answered by one line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from redis.asyncio import Redis

from rollpacker.devices.lease import DevicesBusyError, Grant, MemoryNotFreedError, StaleLeaseError
from rollpacker.devices.store import DeviceLeases

TOTAL = 1000


class FakeGpus:
    """`count` devices of TOTAL bytes below a directory."""

    def __init__(self, directory: Path, count: int) -> None:
        self._devices = [directory / str(index) for index in range(count)]
        for device in self._devices:
            device.mkdir(parents=True, exist_ok=True)

    def set_used(self, device: int, size: int) -> None:
        """By this process."""
        (self._devices[device] / str(os.getpid())).write_text(str(size))

    def free_bytes(self) -> dict[int, int]:
        used = [
            sum(int(f.read_text() or 0) for f in device.iterdir() if _is_alive(int(f.name)))
            for device in self._devices
        ]
        return {index: TOTAL - size for index, size in enumerate(used)}


def _is_alive(pid: int) -> bool:
    """A process that is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def main(url: str, directory: str, devices: str, owner: str, seconds: str) -> None:
    """Obey until the input ends."""
    redis = Redis.from_url(url)
    leases, gpus = (
        DeviceLeases(redis, "host", float(seconds)),
        FakeGpus(Path(directory), int(devices)),
    )
    grant: Grant | None = None
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        try:
            match words:
                case ["claim", count, needed]:
                    grant = await leases.claim(owner, int(count), int(needed), gpus.free_bytes())
                case ["wait", count, needed]:
                    grant = await leases.wait_claim(
                        owner, int(count), int(needed), gpus.free_bytes, patience=60
                    )
                case ["use", size]:
                    assert grant is not None
                    for device in grant.devices:
                        gpus.set_used(device, int(size))
                case ["renew"]:
                    assert grant is not None
                    await leases.renew(grant)
                case ["release"]:
                    assert grant is not None
                    await leases.release(grant, gpus.free_bytes())
        except (DevicesBusyError, StaleLeaseError, MemoryNotFreedError) as error:
            print(json.dumps({"error": type(error).__name__, "said": str(error)}), flush=True)
        else:
            said = {"fence": grant.fence, "devices": grant.devices} if grant else {}
            print(json.dumps(said), flush=True)
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
