"""What of a run is kept, and when it may be.

    backup:   at rest --dump--> Redis' keys, newest complete checkpoint, run directory --> FILE
              (renamed to its name only if the state did not move meanwhile)
    restore:  FILE --hashes checked--> beside the places --renamed--> places --> Redis, state last

A run is at rest when nobody drives it: stopped, failed, succeeded or paused. Published weights are
left out: the trainer publishes those of its checkpoint when the run is opened again. An active run,
were it paused or queued, is never overwritten: the coordinator holds it. A crash while restoring
leaves no run, because its state comes last; what else it left is overwritten with `replace`.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from rollpacker.backup import archive
from rollpacker.backup.archive import BackupError, Manifest
from rollpacker.store import keys, run_dump
from rollpacker.store.records import LayoutError, RunState
from rollpacker.store.run_store import RunStore

_MARKER = "COMPLETE"  # services/trainer/checkpoint.py: one without it is half-written
_DRIVEN = ("running", "pausing", "stopping")
_ACTIVE = (*_DRIVEN, "paused", "queued")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files of runs are: one directory per run below each."""

    runs: Path  # outputs
    checkpoints: Path

    def of(self, run_id: str) -> dict[str, Path]:
        """By part of the archive."""
        return {archive.RUN: self.runs / run_id, archive.CHECKPOINT: self.checkpoints / run_id}


async def back_up(redis: Redis, places: Places, run_id: str, target: Path) -> Manifest:
    """Write a run that is at rest into a new file. Raises BackupError, OSError, RedisError."""
    archive.refuse_existing(target)
    state = await _state_at_rest(redis, run_id)
    before = await _stored(redis, run_id)
    partial, dump = (target.with_name(f"{target.name}.{end}") for end in ("partial", "redis"))
    try:
        with dump.open("x", encoding="utf-8") as lines:
            async for line in run_dump.dump_run(redis, run_id):
                lines.write(line + "\n")
        members = [(archive.DUMP, dump), *_files(places, run_id)]
        manifest = Manifest(run_id, state.step, state.status, state.create_time, {})
        manifest = archive.write(partial, members, manifest)
        if await _stored(redis, run_id) != before:
            raise BackupError(f"run {run_id} moved on meanwhile; stop it and try again")
        partial.rename(target)
    finally:
        dump.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
    return manifest


async def restore(redis: Redis, places: Places, source: Path, *, replace: bool = False) -> Manifest:
    """Bring a run back. Raises BackupError, OSError, RedisError.

    `replace`: instead of what is there under its name; otherwise that is refused.
    """
    manifest = archive.read_manifest(source)
    if not _RUN_ID.fullmatch(manifest.run_id):
        raise BackupError(f"{source}: {manifest.run_id!r} is no run id")
    targets = places.of(manifest.run_id)
    await _refuse_to_overwrite(redis, manifest.run_id, targets, replace)
    aside = {part: path.with_name(f".restoring-{path.name}") for part, path in targets.items()}
    try:
        for path in aside.values():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        lines = archive.extract(source, manifest, aside)
        await run_dump.delete_run(redis, manifest.run_id)
        for part, path in targets.items():
            shutil.rmtree(path, ignore_errors=True)
            aside[part].rename(path)
        await run_dump.restore_run(redis, manifest.run_id, lines, manifest.create_time)
    except run_dump.DumpError as error:
        raise BackupError(f"{source}: {error}") from error
    finally:
        for path in aside.values():
            shutil.rmtree(path, ignore_errors=True)
    return manifest


async def _state_at_rest(redis: Redis, run_id: str) -> RunState:
    try:
        state = await RunStore(redis, run_id).load()
    except LayoutError as error:
        raise BackupError(f"run {run_id}: {error}") from error
    if state is None:
        raise BackupError(f"Redis holds no run {run_id!r}; see `rollpacker status`")
    if state.status in _DRIVEN:
        raise BackupError(f"run {run_id} is {state.status}; first: rollpacker stop {run_id}")
    return state


async def _stored(redis: Redis, run_id: str) -> dict[bytes, bytes]:
    found: Any = await redis.hgetall(keys.state(run_id))
    return dict(found)


def _files(places: Places, run_id: str) -> list[tuple[str, Path]]:
    """(member, file) of the run directory and of the newest complete checkpoint."""
    of = places.of(run_id)
    found = archive.below(archive.RUN, of[archive.RUN], of[archive.RUN])
    complete = [path.parent for path in of[archive.CHECKPOINT].glob(f"step_*/{_MARKER}")]
    for newest in sorted(complete)[-1:]:
        found += archive.below(archive.CHECKPOINT, newest, of[archive.CHECKPOINT])
    return found


async def _refuse_to_overwrite(
    redis: Redis, run_id: str, targets: dict[str, Path], replace: bool
) -> None:
    status = (await _stored(redis, run_id)).get(b"status", b"").decode()
    if status in _ACTIVE:
        raise BackupError(f"run {run_id} is {status} here; first: rollpacker stop {run_id}")
    there = [str(path) for path in targets.values() if path.exists()]
    there += ["Redis"] if await run_dump.run_exists(redis, run_id) else []
    if there and not replace:
        raise BackupError(
            f"run {run_id} is here already ({', '.join(there)}); --replace overwrites it"
        )
