"""What a version of weights consists of, and the proof that a directory is that version.

`manifest.json` names every other file of its directory with size and SHA-256, and every tensor of
the safetensors files with dtype and shape (read from their headers, so no torch is needed).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

MANIFEST: Final = "manifest.json"
_HASHED_AT_ONCE = 4  # files; hashing lets other threads run
_LENGTH_BYTES = 8  # of the header of a safetensors file


class ManifestError(ValueError):
    """This is no manifest."""


class DamagedWeightsError(Exception):
    """A directory is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file."""

    bytes: int
    sha256: str  # in hex


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor."""

    dtype: str  # as safetensors spells it, for example F32
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of weights."""

    weight_version: int
    files: Mapping[str, FileEntry]  # by name, sorted
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def of_directory(cls, directory: Path, weight_version: int) -> Manifest:
        """Of the files that are there now."""
        paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
        tensors: dict[str, TensorEntry] = {}
        for path in paths:
            if path.suffix == ".safetensors":
                tensors |= _tensors(path)
        return cls(weight_version, _entries(paths), tensors)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises ManifestError; file names that lead out of a directory are refused."""
        try:
            values = json.loads(text)
            files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
            tensors = {
                name: TensorEntry(entry["dtype"], tuple(entry["shape"]))
                for name, entry in values["tensors"].items()
            }
            version = int(values["weight_version"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"no manifest of weights: {error!r}") from error
        for name, entry in files.items():
            if Path(name).name != name or name.startswith(".") or name == MANIFEST:
                raise ManifestError(f"{name!r} cannot be a file of a version")
            if not (isinstance(entry.bytes, int) and entry.bytes >= 0):
                raise ManifestError(f"{name}: {entry.bytes!r} is no size")
        return cls(version, files, tensors)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def read_manifest(directory: Path) -> Manifest | None:
    """None: the directory has none. Raises ManifestError."""
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    return Manifest.from_json(text)


def verify(directory: Path, manifest: Manifest) -> None:
    """Hash every file. Raises DamagedWeightsError."""
    try:
        found = _entries([directory / name for name in manifest.files])
    except OSError as error:
        raise DamagedWeightsError(f"{directory} cannot be read: {error}") from error
    for name, entry in manifest.files.items():
        if found[name] != entry:
            raise DamagedWeightsError(
                f"{directory / name} has {found[name].bytes} bytes with SHA-256"
                f" {found[name].sha256[:16]}..., its manifest says {entry.bytes} and"
                f" {entry.sha256[:16]}..."
            )


def version_directory(root: Path, run_id: str, weight_version: int) -> Path:
    """Where a version of a run is below a weights root."""
    return root / run_id / f"step_{weight_version:06d}"


def _entries(paths: list[Path]) -> dict[str, FileEntry]:
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        return dict(zip((path.name for path in paths), threads.map(_entry, paths), strict=True))


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def _tensors(path: Path) -> dict[str, TensorEntry]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return {
        name: TensorEntry(entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
