"""wandb (offline) and mlflow (its file store) as they are: `make test-trackers`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2

from services.coordinator.outputs.trackers import TrackedRun, Trackers

RUN_ID = "gcd-1"


def tracked(directory: Path, *names: str) -> Trackers:
    tracking = {
        "trackers": names,
        "project": "maths",
        "wandb_mode": "offline",
        "mlflow_uri": (directory / "mlruns").as_uri(),
    }
    return Trackers(TrackedRun(RUN_ID, directory, {"seed": 1, "tracking": tracking}))


def write_two_parts(directory: Path, name: str) -> None:
    """Three steps, then another process goes on and writes the last of them again."""
    trackers = tracked(directory, name)
    for step in range(3):
        trackers.write(step, 1e9 + step, {"reward/mean": step / 10, "bias/ratio": float("nan")})
    trackers.close()
    trackers = tracked(directory, name)
    trackers.write(2, 2e9, {"reward/mean": 0.9, "validation/held_out/pass@4": 0.5})
    trackers.close()


def test_mlflow_keeps_one_run_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write_two_parts(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("maths")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (RUN_ID, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (2, 0.9),
    ]
    measured = {"reward/mean": 0.9, "validation/held_out/pass_at_4": 0.5}
    assert run.data.metrics == measured  # what is not finite is left out


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: 7 bytes of head, then those of LevelDB's log, in one block.

    A record is its CRC (4 bytes), its length (2), its type (1: it is whole), and its content.
    """
    data = path.read_bytes()
    at = 7
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "longer than a block: this test writes less"
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


def wandb_history(path: Path) -> list[tuple[float, float]]:
    """Step and reward of each row."""
    rows = []
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            rows.append((json.loads(values["step"]), json.loads(values["reward/mean"])))
    return rows


def test_wandb_offline_keeps_every_step_under_the_id_of_the_run(tmp_path: Path) -> None:
    trackers = tracked(tmp_path, "wandb")
    for step, reward in ((0, 0.0), (1, 0.1), (2, 0.2), (1, 0.9)):  # a rewind goes back
        trackers.write(step, 1e9 + step, {"reward/mean": reward, "bias/ratio": float("nan")})
    trackers.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert path.name == f"run-{RUN_ID}.wandb"
    assert wandb_history(path) == [(0, 0.0), (1, 0.1), (2, 0.2), (1, 0.9)]
