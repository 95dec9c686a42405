"""How fast weights go from the trainer to the engines: GB/s of each carrier, and of a plain copy.

    python benchmarks/weight_refit.py --bytes 540000000 --receivers 2

Real servers on loopback, one process per receiver. A version of `--bytes` (the size of
SmolLM2-135M in float32) is published and brought to the receivers by each carrier, every time into
an empty directory; all times include the SHA-256 of what arrived. `copy` is the copy bandwidth of
this machine (one thread, memory to memory) and `sha256` that of the hash, in the same run. One
JSON line per figure; `of_copy` is the share of the copy bandwidth. `broadcast` counts the bytes of
one receiver, as they all get them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rollpacker.refit import sender
from rollpacker.refit.broadcast import Broadcaster
from rollpacker.refit.manifest import MANIFEST, Manifest, verify, version_directory
from rollpacker.refit.receiver import Receiver
from rollpacker.rpc.server import RpcServer
from rollpacker.v1 import weights_service_pb2_grpc

HOST = "127.0.0.1"
TENSORS = 64


def publish(root: Path, size: int) -> Path:
    directory = version_directory(root, "run", 0)
    directory.mkdir(parents=True)
    tensors = {f"layer.{i}": torch.randn(size // 4 // TENSORS) for i in range(TENSORS)}
    save_file(tensors, directory / "model.safetensors")
    (directory / MANIFEST).write_bytes(Manifest.of_directory(directory, 0).to_json())
    return directory


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """The median of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def receive(root: Path, address: str, broadcast_host: str) -> float:
    """In a process of its own; returns when it was done, on the clock of all processes."""
    receiver = Receiver(root, seconds=300, broadcast_host=broadcast_host)
    asyncio.run(receiver.receive(address, "run", 0))
    return time.time()


async def carried(
    directory: Path, scratch: Path, receivers: int, broadcast: bool, pool: ProcessPoolExecutor
) -> float:
    """Seconds until all receivers have a verified version; the moment that a broadcast gathers
    its receivers in is part of it."""
    servicer = sender.WeightsServicer(directory.parent.parent, Broadcaster(HOST, 60))
    server = RpcServer(
        f"{HOST}:0",
        [sender.SERVICE_NAME],
        lambda grpc: weights_service_pb2_grpc.add_WeightsServiceServicer_to_server(servicer, grpc),
    )
    await server.start()
    try:
        loop, start = asyncio.get_running_loop(), time.time()
        host = HOST if broadcast else ""
        ends = await asyncio.gather(
            *(
                loop.run_in_executor(pool, receive, scratch / str(i), server.address, host)
                for i in range(receivers)
            )
        )
        return max(ends) - start
    finally:
        await server.stop()
        shutil.rmtree(scratch)


def figures(root: Path, size: int, receivers: int, repeats: int) -> Iterator[dict[str, Any]]:
    directory = publish(root / "published", size)
    weights = directory / "model.safetensors"
    actual = weights.stat().st_size
    source = np.fromfile(weights, dtype=np.uint8)
    target = np.empty_like(source)
    copy = actual / seconds(lambda: np.copyto(target, source), 5) / 1e9
    hashed = actual / seconds(lambda: hashlib.sha256(source).hexdigest(), 3) / 1e9
    common = {"benchmark": "weight_refit", "bytes": actual}
    yield {**common, "carrier": "copy", "gb_per_second": round(copy, 3)}
    yield {**common, "carrier": "sha256", "gb_per_second": round(hashed, 3)}
    manifest = Manifest.from_json((directory / MANIFEST).read_bytes())

    def line(carrier: str, count: int, taken: float) -> dict[str, Any]:
        speed = actual / taken / 1e9
        return {
            **common,
            "carrier": carrier,
            "receivers": count,
            "seconds": round(taken, 3),
            "gb_per_second": round(speed, 3),
            "of_copy": round(speed / copy, 3),
        }

    yield line("file", 1, seconds(lambda: verify(directory, manifest), repeats))
    spawn = multiprocessing.get_context("spawn")  # never fork after gRPC has started
    with ProcessPoolExecutor(receivers, mp_context=spawn) as pool:
        list(pool.map(abs, range(receivers)))
        for broadcast in (False, True):
            for count in sorted({1, receivers}):
                taken = [
                    asyncio.run(carried(directory, root / "scratch", count, broadcast, pool))
                    for _ in range(repeats + 1)
                ]  # the first one imports
                name = "broadcast" if broadcast else "stream"
                yield line(name, count, statistics.median(taken[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=540_000_000)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))  # noqa: S108  memory
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root) as name:
        for figure in figures(Path(name), args.bytes, args.receivers, args.repeats):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
