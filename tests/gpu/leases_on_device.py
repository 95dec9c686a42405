"""Engine and trainer take turns on one real GPU, lent by a real coordinator.

    python tests/gpu/leases_on_device.py --device cuda

A tiny run in colocated placement on a stack of real processes, and a watcher that reads who holds
the GPU and how much of it is free. Prints a JSON line and ends with status 1 when the sides never
took turns, or when the GPU was not free while nobody held it. Not collected by pytest: it is one
short script for a machine with a GPU (`--device cpu` tries the script itself on a fake one).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from rollpacker.devices.fake import FakeMeter, make_fake_gpus
from rollpacker.devices.memory import Meter, NvidiaMeter
from tests.integration.real_runs import RealStack, proof_settings, running_stack
from tests.tiny_run import write_model

PROMPTS = 24
SHARE = 0.8


async def watch(real: RealStack, meter: Meter, seen: list[tuple[str, float]]) -> None:
    """For ever: who holds the first device, and what share of it is free."""
    while True:
        before = await real.devices()
        device, memory = next(iter(meter.memory().items()))
        if before == await real.devices():  # else the memory may be that of either
            seen.append((before.get(device, ""), memory.free / memory.total))
        await asyncio.sleep(0.02)


def settings(device: str, directory: Path) -> tuple[dict[str, str], Meter]:
    """Environment of the services, and a meter of the same devices."""
    if device == "cuda":
        names = ("ROLLOUT_DEVICE", "TRAINER_DEVICE")
        return {f"ROLLPACKER_{name}": "cuda" for name in names}, NvidiaMeter(["0"])
    make_fake_gpus(directory / "gpus", 1, 300_000)
    names = ("ROLLOUT_FAKE_DEVICES", "TRAINER_FAKE_DEVICES")
    fakes = {f"ROLLPACKER_{name}": str(directory / "gpus") for name in names}
    return fakes, FakeMeter(directory / "gpus")


async def main(device: str) -> int:
    seen: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        directory = Path(name)
        write_model(directory / "model")
        environment, meter = settings(device, directory)
        for key, value in environment.items():
            patch.setenv(key, value)
        async with running_stack(directory, rollouts=1) as real:
            watching = asyncio.create_task(watch(real, meter, seen))
            start = time.monotonic()
            values = proof_settings(directory, PROMPTS) | {"placement": "colocated"}
            trace = await real.run("turns", values)
            seconds = time.monotonic() - start
            watching.cancel()
    turns = [holder for holder, _ in groupby(holder for holder, _ in seen if holder)]
    idle = [free for holder, free in seen if not holder]
    figure = {"check": "leases", "device": device, "steps": len(trace.schedule)}
    figure |= {"seconds": round(seconds, 1), "turns_seen": len(turns), "looks": len(seen)}
    figure |= {"least_free_share_when_nobody_holds_it": round(min(idle, default=1.0), 3)}
    print(json.dumps(figure))
    took_turns = {"rollout-0", "trainer-0"} <= set(turns)
    return 0 if took_turns and min(idle, default=1.0) >= SHARE else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    sys.exit(asyncio.run(main(parser.parse_args().device)))
