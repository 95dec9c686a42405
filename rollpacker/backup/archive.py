"""The file of a backup: a tar whose last member, `manifest.json`, names all others.

Members are `redis.jsonl`, `checkpoint/...` and `run/...`; the manifest has size and SHA-256 of
each. Nothing in the file is executed or unpickled, and it is read only if its members are exactly
those of the manifest and plain files below their places.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO

from rollpacker.store.records import LAYOUT_VERSION, READABLE, READABLE_LAYOUTS

FORMAT = 1
DUMP, CHECKPOINT, RUN = "redis.jsonl", "checkpoint", "run"
_MANIFEST = "manifest.json"
_BLOCK = 1 << 20


class BackupError(Exception):
    """A backup cannot be made or read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup says about itself."""

    run_id: str
    step: int  # committed
    status: str
    create_time: float  # of the run, seconds since the Unix epoch
    files: dict[str, tuple[int, str]]  # size and SHA-256, by member
    layout_version: int = LAYOUT_VERSION
    format: int = FORMAT


def refuse_existing(target: Path) -> None:
    """Raises BackupError where there is a file already, or no directory for one."""
    if not target.parent.is_dir():
        raise BackupError(f"{target.parent} is no directory; make it, or name another file")
    if os.path.lexists(target):
        raise BackupError(f"{target} exists; name a new file")


def write(target: Path, members: Sequence[tuple[str, Path]], manifest: Manifest) -> Manifest:
    """Write a new file of (member, file), synced; returns the manifest with their hashes."""
    files: dict[str, tuple[int, str]] = {}
    with target.open("xb") as out:
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, path in members:
                with path.open("rb") as file:
                    hashing = _HashingFile(file)
                    entry = _entry(name, path.stat().st_size)
                    tar.addfile(entry, hashing)
                files[name] = (entry.size, hashing.hexdigest())
            manifest = replace(manifest, files=files)
            values = {name: getattr(manifest, name) for name in Manifest.__slots__}
            text = json.dumps(values, indent=1).encode()
            tar.addfile(_entry(_MANIFEST, len(text)), io.BytesIO(text))
        out.flush()
        os.fsync(out.fileno())
    return manifest


def read_manifest(source: Path) -> Manifest:
    """The manifest of a file that is a backup this version reads. Raises BackupError, OSError."""
    try:
        with tarfile.open(source, "r:") as tar:
            members = {member.name: member for member in tar.getmembers()}
            values = json.loads(_member(tar, _MANIFEST).read())
        files = {name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
        manifest = Manifest(**{**values, "run_id": str(values["run_id"]), "files": files})
    except (tarfile.TarError, KeyError, TypeError, ValueError) as error:
        raise BackupError(f"{source} is no backup, or was cut off: {error}") from error
    if manifest.format != FORMAT or manifest.layout_version not in READABLE_LAYOUTS:
        raise BackupError(
            f"{source} has format {manifest.format} and state layout {manifest.layout_version};"
            f" this version reads format {FORMAT} and layouts {READABLE}."
            " Restore it with the version that made it"
        )
    if members.keys() - {_MANIFEST} != files.keys() or DUMP not in files:
        raise BackupError(f"{source}: its members are not those that its manifest names")
    for name, member in members.items():
        if not member.isreg() or not _has_a_place(name):
            raise BackupError(f"{source}: {name!r} is no plain file of a backup")
    return manifest


def extract(source: Path, manifest: Manifest, directories: dict[str, Path]) -> list[str]:
    """Write the files of each part below its new directory; returns the lines of the dump.

    Raises BackupError for what is damaged; then what is written already must not be used.
    """
    lines: list[str] = []
    with tarfile.open(source, "r:") as tar:
        for name, (_, expected) in manifest.files.items():
            file = _HashingFile(_member(tar, name))
            if name == DUMP:
                lines = file.read().decode(errors="replace").splitlines()
            else:
                part, _, rest = name.partition("/")
                path = directories[part] / rest
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as out:
                    out.writelines(_blocks(file))
            if file.hexdigest() != expected:
                raise BackupError(f"{source}: {name} is damaged, its SHA-256 is another")
    return lines


class _HashingFile:
    """A file that is read once, and its SHA-256."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._digest.update(block)
        return block

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry


def _member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """Raises KeyError for a member that is missing or no plain file."""
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file


def _blocks(file: _HashingFile) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _has_a_place(name: str) -> bool:
    path = PurePosixPath(name)
    parts, plain = path.parts, path.as_posix() == name and ".." not in path.parts
    return name in (_MANIFEST, DUMP) or (plain and len(parts) > 1 and parts[0] in (CHECKPOINT, RUN))


def below(part: str, directory: Path, top: Path) -> list[tuple[str, Path]]:
    """(member, file) of every file below a directory, named from `top` on."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(f"{part}/{path.relative_to(top).as_posix()}", path) for path in files]
