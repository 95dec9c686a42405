"""Checkpoints: complete or skipped, and a resumed run is the uninterrupted one to the last bit."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rollpacker.types import StepResult
from services.trainer import checkpoint
from services.trainer.checkpoint import CheckpointRecord, CheckpointStore
from services.trainer.packing import StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.replica import (
    Accumulate,
    GatherWeights,
    Open,
    Replica,
    SaveTensors,
    Update,
    WholeWeights,
)
from tests.trainer_support import make_draw, make_group, make_model, trainer_settings


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


def record(version: int, **changes) -> CheckpointRecord:
    result = StepResult(
        version, f"file:///w/{version}", (make_draw(1), make_draw(2)), {"loss": 0.25}
    )
    base = CheckpointRecord(result, "hash", '{"cursor": 3}', 0)
    return dataclasses.replace(base, **changes)


def write(store: CheckpointStore, version: int) -> Path:
    """A checkpoint whose tensors are a few bytes."""
    partial = store.begin(version)
    (partial / "__0_0.distcp").write_bytes(b"tensors %d" % version)
    return store.commit(partial, record(version))


def open_replica(directory: Path, path: Path | None = None) -> Replica:
    replica = Replica(Ranks())
    replica.execute(Open(directory, trainer_settings(), 1.0, path))
    return replica


def train(replica: Replica, step: int) -> None:
    packer = StreamPacker(1, 96)
    for index in range(5):
        packer.add(make_group(10 * step + index, step))
    ((window,),) = packer.flush()  # one replica of one rank
    replica.execute(Accumulate(window))
    replica.execute(Update())


def weights(replica: Replica) -> dict[str, torch.Tensor]:
    whole = replica.execute(GatherWeights())
    assert isinstance(whole, WholeWeights)
    return whole.tensors


def assert_same_bits(one: Replica, other: Replica) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(model_directory, tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    straight, interrupted = open_replica(model_directory), open_replica(model_directory)
    for step in range(4):
        train(straight, step)
    for step in range(2):
        train(interrupted, step)
    partial = store.begin(2)
    written = interrupted.execute(SaveTensors(partial))
    train(interrupted, 2)  # while it is written
    assert isinstance(written, Future)
    written.result()
    path = store.commit(partial, record(2))
    resumed = open_replica(model_directory, path)
    train(resumed, 2)
    assert_same_bits(resumed, interrupted)
    train(resumed, 3)
    assert_same_bits(resumed, straight)


def test_a_checkpoint_that_cannot_be_written_says_so(model_directory, tmp_path):
    replica = open_replica(model_directory)
    train(replica, 0)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BaseException, match="file"):
        replica.execute(SaveTensors(tmp_path / "file")).result()


def test_the_record_comes_back_as_it_was(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    partial = store.begin(7)
    kept = record(
        7, settings_hash="abc", run_snapshot_json='{"x": [1]}', skipped_updates_in_a_row=2
    )
    path = store.commit(partial, kept)
    newest = store.newest()
    assert newest is not None
    assert (newest.path, newest.record) == (path, kept)


def test_the_last_few_are_kept_and_none_of_a_lost_past(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for version in (1, 2, 3, 4):
        write(store, version)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000003", "step_000004"]
    write(store, 2)  # the run was rewound
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000002"]


@pytest.mark.parametrize("damage", ["no marker", "short file", "missing file", "torn marker"])
def test_a_half_written_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, damage):
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    path = write(store, 2)
    match damage:
        case "no marker":
            (path / "COMPLETE").unlink()
        case "short file":
            (path / "__0_0.distcp").write_bytes(b"ten")
        case "missing file":
            (path / "record.json").unlink()
        case "torn marker":
            (path / "COMPLETE").write_text('{"record.json": 1')
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None
    assert newest.record.weight_version == 1
    assert str(path) in caplog.text
    write(store, 2)  # saved again
    newest = store.newest()
    assert newest is not None
    assert newest.record.weight_version == 2


def commit_and_die(directory: Path, moment: int) -> bool:
    """Commit version 2 in a child that kills itself before its moment-th fsync.

    Returns whether it was killed (else it came to its end).
    """
    child = os.fork()
    if child == 0:
        calls = 0
        fsync = checkpoint.fsync

        def dying_fsync(path: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(path)

        checkpoint.fsync = dying_fsync
        write(CheckpointStore(directory, keep=1), 2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    seen = set()
    killed, moment = True, 0
    while killed:
        moment += 1
        directory = tmp_path / str(moment)
        write(CheckpointStore(directory, keep=1), 1)
        killed = commit_and_die(directory, moment)
        newest = CheckpointStore(directory, keep=1).newest()
        assert newest is not None
        version = newest.record.weight_version
        assert (newest.path / "__0_0.distcp").read_bytes() == b"tensors %d" % version
        seen.add((killed, version))
        write(CheckpointStore(directory, keep=1), 2)
        assert [path.name for path in directory.iterdir()] == ["step_000002"]
    assert seen == {(True, 1), (True, 2), (False, 2)}
    assert moment >= 6  # two files, three directories, the marker
