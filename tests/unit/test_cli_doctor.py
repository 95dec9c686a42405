"""What `doctor` makes of a machine: the rules on facts, and one look at this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.cli.doctor import GIB, Facts, findings, gather

GOOD = Facts(
    gpus=("H100, 570",),
    nccl=True,
    shared_memory=64 * GIB,
    open_files=65536,
    locked_memory=-1,
    user_namespaces=True,
    free_disk=500 * GIB,
    disk_place="/data",
    clock_synchronised=True,
    certificate_days=300,
    redis_persistent=True,
)


def test_a_fit_machine_has_nothing_to_mend() -> None:
    assert [finding for finding in findings(GOOD) if finding.level != "ok" or finding.fix] == []


@pytest.mark.parametrize(
    ("fact", "value", "subject", "level", "fix"),
    [
        ("gpus", (), "gpu", "note", "NVIDIA driver"),
        ("nccl", False, "nccl", "note", "CUDA build of torch"),
        ("shared_memory", 64 * 1024**2, "/dev/shm", "bad", "shm_size"),
        ("shared_memory", None, "/dev/shm", "bad", "mount"),
        ("open_files", 1024, "open files", "bad", "ulimit -n"),
        ("locked_memory", 65536, "locked memory", "note", "ulimit -l"),
        ("user_namespaces", False, "user namespaces", "note", "max_user_namespaces"),
        ("free_disk", 5 * GIB, "disk", "note", "/data"),
        ("free_disk", 0, "disk", "bad", "/data"),
        ("port_taken", True, "port", "note", "--port"),
        ("clock_synchronised", False, "clock", "note", "set-ntp"),
        ("clock_synchronised", None, "clock", "note", "set-ntp"),
        ("certificate_days", -1, "security", "bad", "make certs"),
        ("certificate_days", 10, "security", "note", "make certs"),
        ("security_problem", "key_file: is not set", "security", "bad", "security.md"),
        ("redis_persistent", False, "redis", "bad", "appendonly yes"),
        ("redis_problem", "no answer", "redis", "bad", "REDIS_URL"),
    ],
)
def test_each_fault_is_found_with_its_fix(
    fact: str, value: object, subject: str, level: str, fix: str
) -> None:
    found = [f for f in findings(replace(GOOD, **{fact: value})) if f.level != "ok"]
    assert [(f.subject, f.level) for f in found] == [(subject, level)]
    assert fix in found[0].fix


def test_apparmor_is_named_where_it_forbids_namespaces() -> None:
    facts = replace(GOOD, user_namespaces=False, apparmor_restricts=True)
    (found,) = [f for f in findings(facts) if f.level != "ok"]
    assert "apparmor" in found.fix


def test_nccl_is_found_beside_the_packages_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert gather(tmp_path).nccl


def test_this_machine_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "redis://u:verysecret@127.0.0.1:1/0"
    monkeypatch.setenv("ROLLPACKER_COORDINATOR_REDIS_URL", secret)
    facts = gather(tmp_path / "not" / "there")
    assert facts.disk_place == str(tmp_path)
    assert facts.free_disk > 0
    assert facts.redis_problem
    assert "verysecret" not in str(facts)
    monkeypatch.setenv("ROLLPACKER_COORDINATOR_REDIS_URL", "verysecret@nowhere")
    assert gather(tmp_path).redis_problem == "its URL is none of redis://, rediss:// and unix://"
