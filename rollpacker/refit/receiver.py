"""Brings a version from a WeightsService to a directory of this host.

    absent --manifest--> partial (`.partial-...`, grows) --every hash agrees--> whole (renamed)
                           ^         |
                           +- kill --+   what is there is hashed, and the rest is asked for

Only `receive` returns a directory, and only a whole one. A version whose manifest has changed (the
run was rewound) is received anew. The last two versions of a run stay, and none of the runs before
it: one run is active at a time, and one receiver uses a root.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
import zlib
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO

from rollpacker.refit import broadcast
from rollpacker.refit.manifest import (
    MANIFEST,
    DamagedWeightsError,
    FileEntry,
    Manifest,
    ManifestError,
    verify,
    version_directory,
)
from rollpacker.rpc.client import call, open_channel, stream
from rollpacker.rpc.errors import DataLossError, DeadlineExceededError, ServiceError
from rollpacker.v1 import weights_service_pb2 as pb
from rollpacker.v1 import weights_service_pb2_grpc

_KEEP = 2
_PIECE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Receiver:
    """Receives versions below one root."""

    def __init__(self, root: Path, *, seconds: float, broadcast_host: str = "") -> None:
        """`seconds`: deadline of one `receive`. `broadcast_host`: of this machine; empty: streams
        only."""
        self._root = root
        self._seconds = seconds
        self._broadcast_host = broadcast_host

    async def receive(self, address: str, run_id: str, weight_version: int) -> Path:
        """The whole, verified directory of a version, from the service at `address`.

        What arrives damaged is asked for once more. Raises what the service refuses with;
        UnavailableError, DeadlineExceededError (what has come is kept for the next try);
        DataLossError (WEIGHTS_DAMAGED).
        """
        deadline = time.monotonic() + self._seconds
        async with open_channel(address) as channel:
            transfer = _Transfer(
                stub=weights_service_pb2_grpc.WeightsServiceStub(channel),
                names={"run_id": run_id, "weight_version": weight_version},
                deadline=deadline,
            )
            text = await transfer.manifest()
            manifest = _parsed(text)
            whole = version_directory(self._root, run_id, weight_version)
            if _has_manifest(whole, text):
                return whole
            partial = whole.with_name(f".partial-{whole.name}")
            await asyncio.to_thread(_prepare, partial, text, manifest)
            if not (self._broadcast_host and await self._broadcast(transfer, partial, manifest)):
                for name, entry in manifest.files.items():
                    await _twice(transfer, partial / name, entry)
        await asyncio.to_thread(self._finish, partial, whole)
        return whole

    def _finish(self, partial: Path, whole: Path) -> None:
        shutil.rmtree(whole, ignore_errors=True)
        partial.rename(whole)
        of_this_run = sorted(whole.parent.glob("step_[0-9]*"))[:-_KEEP]
        of_others = [path for path in self._root.glob("*/") if path != whole.parent]
        for old in [*of_this_run, *of_others]:
            if old != whole:
                shutil.rmtree(old)

    async def _broadcast(self, transfer: _Transfer, partial: Path, manifest: Manifest) -> bool:
        """Whether it worked; if not, the stream is the way on."""
        files = [(partial / name, entry.bytes) for name, entry in manifest.files.items()]
        try:
            place = await transfer.place()
            await asyncio.to_thread(broadcast.receive, place, self._broadcast_host, files)
            await asyncio.to_thread(verify, partial, manifest)
        except (ServiceError, broadcast.BroadcastError, DamagedWeightsError) as error:
            _log.warning("no broadcast of weights, so they are streamed: %s", error)
            for path, _ in files:
                path.unlink(missing_ok=True)
            return False
        return True


class _Transfer:
    """The calls for one version, under one deadline."""

    def __init__(self, stub: Any, names: dict[str, Any], deadline: float) -> None:
        self._stub = stub
        self._names = names
        self._deadline = deadline

    @property
    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(
                "REFIT_TOO_SLOW", f"{self._names} did not arrive in time; what came is kept"
            )
        return left

    async def manifest(self) -> bytes:
        request = pb.GetManifestRequest(**self._names)
        answer = await call(lambda: self._stub.GetManifest(request, timeout=self._left))
        text: bytes = answer.manifest_json
        return text

    async def place(self) -> broadcast.Place:
        request = pb.JoinBroadcastRequest(**self._names)
        answer = await call(lambda: self._stub.JoinBroadcast(request, timeout=self._left))
        return broadcast.Place(
            store_host=answer.store_host,
            store_port=answer.store_port,
            rank=answer.rank,
            world_size=answer.world_size,
            timeout_seconds=min(answer.timeout_seconds, self._left),
        )

    async def file(self, path: Path, entry: FileEntry) -> None:
        """Fetch what is missing of a file; its hash must be right then."""
        digest = hashlib.sha256()
        with path.open("a+b") as file:
            offset = await asyncio.to_thread(_hash_what_is_there, file, digest)
            if offset < entry.bytes:
                request = pb.ReadFileRequest(**self._names, file_name=path.name, offset=offset)
                messages = stream(lambda: self._stub.ReadFile(request, timeout=self._left))
                async with aclosing(messages):
                    async for message in messages:
                        await asyncio.to_thread(_append, file, digest, message)
                offset = file.tell()
        if (offset, digest.hexdigest()) != (entry.bytes, entry.sha256):
            await asyncio.to_thread(path.unlink)
            raise DataLossError(
                "WEIGHTS_DAMAGED",
                f"{path.name} of {self._names} came with {offset} of {entry.bytes} bytes and"
                " another SHA-256 than its manifest says; look at the disk of the trainer",
            )


async def _twice(transfer: _Transfer, path: Path, entry: FileEntry) -> None:
    try:
        await transfer.file(path, entry)
    except DataLossError as error:
        _log.warning("asking once more: %s", error)
        await transfer.file(path, entry)


def _parsed(text: bytes) -> Manifest:
    try:
        return Manifest.from_json(text)
    except ManifestError as error:
        raise DataLossError("WEIGHTS_DAMAGED", str(error)) from error


def _has_manifest(directory: Path, text: bytes) -> bool:
    try:
        return (directory / MANIFEST).read_bytes() == text
    except FileNotFoundError:
        return False


def _prepare(partial: Path, text: bytes, manifest: Manifest) -> None:
    """A directory with this manifest; what an earlier try left of the same version stays."""
    if not _has_manifest(partial, text):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / MANIFEST).write_bytes(text)
    for other in partial.parent.glob(".partial-*"):
        if other != partial:
            shutil.rmtree(other)
    for path in partial.iterdir():
        if path.name in manifest.files and path.stat().st_size > manifest.files[path.name].bytes:
            path.unlink()


def _hash_what_is_there(file: BinaryIO, digest: Any) -> int:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return file.tell()


def _append(file: BinaryIO, digest: Any, message: pb.ReadFileResponse) -> None:
    if message.offset != file.tell() or zlib.crc32(message.data) != message.crc32:
        raise DataLossError(
            "WEIGHTS_DAMAGED",
            f"a piece at {message.offset} arrived damaged or out of order, behind {file.tell()}",
        )
    digest.update(message.data)
    file.write(message.data)
