"""A process that takes turns on fake GPUs: `python -m tests.integration.device_owner ...`.

Commands come line by line on standard input; each is answered by one line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from redis.asyncio import Redis

from rollpacker.devices.fake import FakeMeter
from rollpacker.devices.lease import DevicesBusyError, Grant, MemoryNotFreedError, StaleLeaseError
from rollpacker.devices.store import DeviceLeases

TOTAL = 1000


async def main(url: str, directory: str, owner: str, seconds: str) -> None:
    """Obey until the input ends."""
    redis = Redis.from_url(url)
    leases, meter = DeviceLeases(redis, float(seconds)), FakeMeter(Path(directory))

    def free() -> dict[str, int]:
        return {device: memory.free for device, memory in meter.memory().items()}

    grant: Grant | None = None
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        try:
            match words:
                case ["claim", count, needed]:
                    grant = await leases.claim(owner, int(count), int(needed), free())
                    meter.keep_to(grant.devices)
                case ["use", size]:
                    meter.hold(int(size))
                case ["renew"]:
                    assert grant is not None
                    await leases.renew(grant)
                case ["release"]:
                    assert grant is not None
                    await leases.release(grant, free())
        except (DevicesBusyError, StaleLeaseError, MemoryNotFreedError) as error:
            print(json.dumps({"error": type(error).__name__, "said": str(error)}), flush=True)
        else:
            said = {"fence": grant.fence, "devices": grant.devices} if grant else {}
            print(json.dumps(said), flush=True)
    await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
