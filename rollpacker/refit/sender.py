"""WeightsService: the published versions below a weights root, for hosts that do not see it.

Stateless but for broadcasts: a version on disk never changes, so any receiver may read any part of
it at any time, and again. A file that is deleted while it is read is still read to its end.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc.aio

from rollpacker.refit.broadcast import Broadcaster, BroadcastError
from rollpacker.refit.manifest import MANIFEST, Manifest, version_directory
from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from rollpacker.v1 import weights_service_pb2 as pb
from rollpacker.v1 import weights_service_pb2_grpc

SERVICE_NAME: Final = "rollpacker.v1.WeightsService"
_CHUNK_BYTES = 1 << 20
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Context = grpc.aio.ServicerContext[Any, Any]


class WeightsServicer(weights_service_pb2_grpc.WeightsServiceServicer):
    """Every method is a contract of weights_service.proto."""

    def __init__(self, root: Path, broadcaster: Broadcaster | None = None) -> None:
        """`broadcaster` None: JoinBroadcast is refused."""
        self._root = root
        self._broadcaster = broadcaster

    async def GetManifest(
        self, request: pb.GetManifestRequest, _context: Context
    ) -> pb.GetManifestResponse:
        _, text = self._published(request.run_id, request.weight_version)
        return pb.GetManifestResponse(manifest_json=text)

    async def ReadFile(
        self, request: pb.ReadFileRequest, _context: Context
    ) -> AsyncIterator[pb.ReadFileResponse]:
        directory, text = self._published(request.run_id, request.weight_version)
        entry = Manifest.from_json(text).files.get(request.file_name)
        if entry is None:
            raise InvalidArgumentError.field(
                "file_name", f"{request.file_name!r} is not in the manifest of {directory.name}"
            )
        if not 0 <= request.offset <= entry.bytes:
            raise OutOfRangeError(
                "OFFSET_BEYOND_END",
                f"{request.offset} is not in 0..{entry.bytes}, the size of {request.file_name}",
            )
        with (directory / request.file_name).open("rb") as file:
            file.seek(request.offset)
            offset = request.offset
            while data := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield pb.ReadFileResponse(offset=offset, data=data, crc32=zlib.crc32(data))
                offset += len(data)

    async def JoinBroadcast(
        self, request: pb.JoinBroadcastRequest, _context: Context
    ) -> pb.JoinBroadcastResponse:
        if self._broadcaster is None:
            raise FailedPreconditionError(
                "NO_BROADCAST", "this trainer has no broadcast_host; read the files instead"
            )
        directory, text = self._published(request.run_id, request.weight_version)
        try:
            place = await self._broadcaster.join(directory, tuple(Manifest.from_json(text).files))
        except BroadcastError as error:
            raise FailedPreconditionError("NO_BROADCAST", str(error)) from error
        return pb.JoinBroadcastResponse(
            store_host=place.store_host,
            store_port=place.store_port,
            rank=place.rank,
            world_size=place.world_size,
            timeout_seconds=place.timeout_seconds,
        )

    def _published(self, run_id: str, weight_version: int) -> tuple[Path, bytes]:
        """Directory and manifest of a version."""
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError.field("run_id", f"{run_id!r} names no run")
        directory = version_directory(self._root, run_id, weight_version)
        try:
            return directory, (directory / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise NotFoundError(
                "WEIGHTS_NOT_FOUND",
                f"weight version {weight_version} of run {run_id} is not published, or no more",
            ) from None
