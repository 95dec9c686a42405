"""`rollpacker demo` from end to end on a tiny job: real services, real Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests import tiny_run

ROLLPACKER = str(Path(sys.executable).with_name("rollpacker"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 prompts, two levels of deferral: six steps per run."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_run.write_model(directory / "model")
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_run.run_settings(directory)))
    return path


@contextmanager
def demo(config: Path, runs: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        (ROLLPACKER, "demo", "--config", str(config), "--runs", str(runs), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    with process, process.stdout:
        yield process
        process.kill()


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Lines up to one that starts so."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError("\n".join(lines))


def trained(runs: Path, run_id: str) -> list[tuple[int, str, int]]:
    """(step, prompt, seed) of every trained response, in order."""
    rows = [
        json.loads(line)
        for path in sorted((runs / run_id / "samples").iterdir())
        for line in path.read_text().splitlines()
    ]
    return [(row["step"], row["draw"]["prompt_id"], row["seed"]) for row in rows]


def test_an_interrupted_demo_is_resumed_and_equals_an_undisturbed_one(
    config: Path, tmp_path: Path
) -> None:
    with demo(config, tmp_path) as process:
        lines = read_until(process, "step 1 ")
        assert lines[0] == "a new demo"
        pids = json.loads((tmp_path / ".demo" / "stack.json").read_text())["processes"]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert len(pids) == 5
    assert not any(Path(f"/proc/{it['pid']}").exists() for it in pids.values())

    with demo(config, tmp_path) as process:
        lines = read_until(process, "report: ")
        assert process.wait() == 0
    assert lines[0].startswith("resuming the demo")
    for run_id in ("demo", "demo-synchronous"):
        assert any(line.startswith(f"{run_id} succeeded: 6 of 6 steps") for line in lines)
    assert any("trained tokens per second" in line for line in lines)
    assert (tmp_path / "demo" / "report.html").exists()
    interrupted = trained(tmp_path, "demo")
    assert len(interrupted) == 24 * 2
    draws = [
        sorted((prompt, seed) for _, prompt, seed in trained(tmp_path, run_id))
        for run_id in ("demo", "demo-synchronous")
    ]
    assert draws[0] == draws[1]

    with demo(config, tmp_path, "--only", "demo") as process:
        lines = read_until(process, "report: ")
        assert process.wait() == 0
    assert lines[0] == f"a new demo; the finished demo was moved to {tmp_path}/*.1"
    assert trained(tmp_path, "demo.1") == interrupted
    assert trained(tmp_path, "demo") == interrupted
