"""Checkpoints of one run: `{checkpoint_root}/{run_id}/step_{weight_version:06d}/`.

A checkpoint holds the model and the optimizer (torch.distributed.checkpoint, so it can be read
by another number of ranks), and `record.json`: the step's result, the settings hash, the run
snapshot of the coordinator and the count of updates skipped in a row.

Life of one: *copied* (model and optimizer, in memory) -> *partial* (written by a thread of each
rank while the trainer goes on, in a directory `.partial-...`, files fsynced) -> *renamed* ->
*complete* (the marker, written last, lists every file with its size). Only complete ones are ever
loaded; anything else is a crash's remainder, skipped with a warning and replaced when its version
is saved again. A checkpoint is never changed after its marker was written. The marker goes first
when an old one is deleted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from google.protobuf import json_format
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rollpacker import wire
from rollpacker.types import StepResult
from rollpacker.v1 import trainer_service_pb2

_MARKER = "COMPLETE"
_RECORD = "record.json"
_PREFIX = "step_"
_PARTIAL = ".partial-"
_log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as meant


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint knows besides tensors."""

    result: StepResult  # of the step that made it; the times of saving and publishing are missing
    settings_hash: str
    run_snapshot_json: str  # the coordinator's own, as FinishStep carried it
    skipped_updates_in_a_row: int

    @property
    def weight_version(self) -> int:
        return self.result.weight_version


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    record: CheckpointRecord


class CheckpointStore:
    """The checkpoints of one run; used by the leader alone."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, if there is one. Warns about half-written ones."""
        for path in reversed(self._paths()):
            if _is_complete(path):
                return Checkpoint(path, _read_record(path / _RECORD))
            _log.warning("skipping %s: it was not written to its end", path)
        return None

    def begin(self, weight_version: int) -> Path:
        """An empty directory for the tensors of a new checkpoint."""
        for remainder in self._directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(remainder)
        partial = self._directory / f"{_PARTIAL}{weight_version:06d}"
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, record: CheckpointRecord) -> Path:
        """Make a directory whose tensors are written a complete checkpoint. Deletes old ones."""
        (partial / _RECORD).write_text(_record_to_json(record), encoding="utf-8")
        files = sorted(path for path in partial.iterdir() if path.is_file())
        for path in files:
            fsync(path)
        fsync(partial)
        final = self._directory / f"{_PREFIX}{record.weight_version:06d}"
        _delete(final)
        partial.rename(final)
        fsync(self._directory)
        sizes = {path.name: path.stat().st_size for path in sorted(final.iterdir())}
        (final / _MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        fsync(final / _MARKER)
        fsync(final)
        self._prune(final)
        return final

    def _prune(self, newest: Path) -> None:
        """Keep the last few, none of them newer than `newest`: those belong to a lost past."""
        paths = self._paths()
        kept = [path for path in paths if path <= newest and _is_complete(path)][-self._keep :]
        for path in paths:
            if path not in kept:
                _delete(path)

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob(f"{_PREFIX}[0-9]*"))


def start_saving(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: ProcessGroup | None,
) -> Future[Any]:
    """Copy model and optimizer, and begin to write the copy into an empty directory, fsynced.

    Collective over `group`, which nothing else uses; None: one process. The future is done when
    the files of all ranks are written. Raises, now or there, what keeps them from being written.
    """
    written = async_save(
        _trained_state(model, optimizer),
        storage_writer=FileSystemWriter(directory, sync_files=True),
        process_group=group,
        no_dist=group is None,
    )
    return cast("Future[Any]", written)


def load_tensors(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read model and optimizer, whatever number of ranks wrote them. Collective."""
    state = _trained_state(model, optimizer)
    alone = not torch.distributed.is_initialized()
    load(state, storage_reader=FileSystemReader(directory), no_dist=alone)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),  # frozen weights are not in it
    )


def _trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer without frozen weights, which come from the initial model."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            model_state.pop(name, None)
    return {"model": model_state, "optimizer": optimizer_state}


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(path: Path) -> bool:
    """Whether the marker is there and every file that it lists has its size."""
    try:
        sizes = json.loads((path / _MARKER).read_text(encoding="utf-8"))
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _delete(path: Path) -> None:
    (path / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _record_to_json(record: CheckpointRecord) -> str:
    result = json_format.MessageToDict(wire.step_result_to_proto(record.result))
    values = {
        "result": result,
        "settings_hash": record.settings_hash,
        "run_snapshot_json": record.run_snapshot_json,
        "skipped_updates_in_a_row": record.skipped_updates_in_a_row,
    }
    return json.dumps(values, indent=1)


def _read_record(path: Path) -> CheckpointRecord:
    values = json.loads(path.read_text(encoding="utf-8"))
    result = json_format.ParseDict(values["result"], trainer_service_pb2.FinishStepResponse())
    return CheckpointRecord(
        result=wire.step_result_from_proto(result),
        settings_hash=values["settings_hash"],
        run_snapshot_json=values["run_snapshot_json"],
        skipped_updates_in_a_row=values["skipped_updates_in_a_row"],
    )
