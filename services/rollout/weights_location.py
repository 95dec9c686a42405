"""From an engine spec to a verified directory that this service may read.

A published directory (it has a manifest) is hashed before it is given out, wherever it came from;
one without a manifest is a plain model directory, which the engine checks as far as it can.

Only `file://` URIs of absolute paths are known. Symbolic links and `..` are resolved, of the
directory and of every file in it, and all must lie below the weights root: a caller can never
make the service read anything else. What lies elsewhere is asked for by run and version, never by
path.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rollpacker.refit.manifest import DamagedWeightsError, ManifestError, read_manifest, verify
from rollpacker.refit.receiver import Receiver
from rollpacker.rpc.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from rollpacker.types import EngineSpec


class WeightsSource:
    """Where the weights of specs come from: the weights root, or else a receiver."""

    def __init__(self, root: Path, receiver: Receiver | None = None) -> None:
        """Without a receiver only what lies below the root is known."""
        self._root = root
        self._receiver = receiver

    async def directory(self, spec: EngineSpec) -> Path:
        """The verified directory of a spec's weights: below the root, or else received.

        Raises what `weights_directory` and `Receiver.receive` raise, DataLossError
        (WEIGHTS_DAMAGED), InvalidArgumentError (the directory is of another weight version).
        """
        if self._receiver and spec.weights_address and not self._is_here(spec.weights_uri):
            return await self._receiver.receive(
                spec.weights_address, spec.run_id, spec.weight_version
            )
        directory = weights_directory(spec.weights_uri, self._root)
        await asyncio.to_thread(_verify, directory, spec)
        return directory

    def _is_here(self, uri: str) -> bool:
        directory = _path(uri).resolve()
        return directory.is_relative_to(self._root.resolve()) and directory.is_dir()


def _verify(directory: Path, spec: EngineSpec) -> None:
    try:
        manifest = read_manifest(directory)
        if manifest is not None:
            verify(directory, manifest)
    except (ManifestError, DamagedWeightsError) as error:
        raise DataLossError("WEIGHTS_DAMAGED", f"{error}; publish the weights again") from error
    if manifest is not None and manifest.weight_version != spec.weight_version:
        raise InvalidArgumentError.field(
            "spec.weights_uri",
            f"{directory} holds weight version {manifest.weight_version}, not the"
            f" {spec.weight_version} of the spec",
        )


def weights_directory(uri: str, root: Path) -> Path:
    """The directory that `uri` names, resolved.

    Raises InvalidArgumentError (not a file URI), PermissionDeniedError (WEIGHTS_OUTSIDE_ROOT),
    NotFoundError (WEIGHTS_NOT_FOUND).
    """
    resolved_root = root.resolve()
    directory = _path(uri).resolve()
    _check_below(directory, resolved_root, uri)
    if not directory.is_dir():
        raise NotFoundError(
            "WEIGHTS_NOT_FOUND", f"{uri} is no directory; publish the weights first"
        )
    for entry in directory.iterdir():
        _check_below(entry.resolve(), resolved_root, uri)
    return directory


def _path(uri: str) -> Path:
    parts = urlsplit(uri)
    path = unquote(parts.path)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    if not (local and path.startswith("/") and path.isprintable()):
        raise InvalidArgumentError.field(
            "spec.weights_uri", f"{uri!r} is no local directory; give file:///absolute/directory"
        )
    return Path(path)


def _check_below(path: Path, root: Path, uri: str) -> None:
    if not path.is_relative_to(root):
        raise PermissionDeniedError(
            "WEIGHTS_OUTSIDE_ROOT",
            f"{uri} leads to {path}, which is not below the weights root {root};"
            " publish there, or start the service with another weights_root",
        )
