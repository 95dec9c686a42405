"""Meters: what the driver says, and what the fake devices promise."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.devices.fake import HISTORY, FakeMemoryError, FakeMeter, make_fake_gpus
from rollpacker.devices.memory import Memory, MeterError, NvidiaMeter

MIB = 1024**2
_HOLDER = """
import sys
from pathlib import Path
from rollpacker.devices.fake import FakeMeter
meter = FakeMeter(Path(sys.argv[1]))
meter.keep_to(["fake-0"])
meter.hold(int(sys.argv[2]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-b, 80994, 81559'\necho 'GPU-a, 512, 81559'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("driver")
def test_free_memory_is_what_the_driver_says() -> None:
    found = NvidiaMeter().memory()
    assert list(found.items()) == [
        ("GPU-b", Memory(80994 * MIB, 81559 * MIB)),
        ("GPU-a", Memory(512 * MIB, 81559 * MIB)),
    ]


@pytest.mark.usefixtures("driver")
def test_only_the_named_devices_may_be_claimed_by_index_or_uuid() -> None:
    assert list(NvidiaMeter(["1"]).memory()) == ["GPU-a"]
    assert list(NvidiaMeter(["GPU-a", "0"]).memory()) == ["GPU-b", "GPU-a"]
    with pytest.raises(MeterError, match="there is no 2; there are GPU-b, GPU-a"):
        NvidiaMeter(["2"]).memory()


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MeterError, match="nvidia-smi"):
        NvidiaMeter().memory()


def test_a_process_sees_the_devices_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    NvidiaMeter().keep_to(["GPU-b", "GPU-a"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_what_a_killed_process_held_is_free_again_and_more_than_fits_is_refused(
    tmp_path: Path,
) -> None:
    make_fake_gpus(tmp_path / "gpus", 2, 100)
    meter = FakeMeter(tmp_path / "gpus")
    meter.keep_to(["fake-0"])
    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "gpus"), "70"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        assert meter.memory() == {"fake-0": Memory(30, 100), "fake-1": Memory(100, 100)}
        meter.hold(30)
        with pytest.raises(FakeMemoryError, match="fake-0: 31 bytes wanted, 30 free"):
            meter.hold(31)
        holder.kill()
    assert meter.memory()["fake-0"] == Memory(70, 100)
    lines = [json.loads(line) for line in (tmp_path / "gpus" / HISTORY).read_text().splitlines()]
    assert [line["bytes"] for line in lines] == [70, 30]
    assert lines[1]["process"].startswith(f"{os.getpid()}-")
    assert lines[1]["holders"] == {f"{holder.pid}-0": 70, lines[1]["process"]: 30}


def test_memory_goes_along_to_other_devices(tmp_path: Path) -> None:
    make_fake_gpus(tmp_path / "gpus", 2, 100)
    meter = FakeMeter(tmp_path / "gpus")
    meter.keep_to(["fake-0"])
    meter.hold(40)
    meter.keep_to(["fake-1"])
    assert [memory.free for memory in meter.memory().values()] == [100, 60]
