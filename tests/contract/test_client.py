"""`rollpacker.client` against a server that fulfils the coordinator's contract, in its process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollpacker.client import Client, connect
from rollpacker.local_stack.ports import free_port
from rollpacker.rpc.errors import InvalidArgumentError, NotFoundError, UnavailableError
from rollpacker.settings import RunSettings
from rollpacker.types import DrawId
from rollpacker.v1 import coordinator_service_pb2 as pb
from tests.contract.coordinator_cluster import Cluster, cluster, coordinator
from tests.contract.test_cli_commands import fake_at
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
SETTINGS = {"model": "/m", "data": {"path": "/d"}}


@pytest.fixture
def address() -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    with fake_at(address):
        yield address


def test_a_run_is_started_watched_changed_and_listed(address: str) -> None:
    with Client(address) as client:
        settings = RunSettings.model_validate(SETTINGS)
        assert client.start_run("mine", settings).state == pb.Run.STATE_RUNNING
        assert client.pause_run("mine").state == pb.Run.STATE_PAUSED
        assert client.step_run("mine").pause_at_step == 1
        assert client.resume_run("mine").pause_at_step == 0
        run = client.update_run("mine", {"trainer": {"learning_rate": 0.5}})
        assert run.updated_settings["trainer"]["learning_rate"] == 0.5
        assert client.add_prompts("mine", [{"prompt_id": "a"}]).added_count == 1
        assert client.drop_draws("mine", [DrawId(0, "p9")], "wrong").dropped_draw_count == 1
        finished = [e.step_finished.step for e in client.watch_run("mine") if e.revision][:3]
        assert finished == [0, 1, 2]
        assert client.get_run("mine").state == pb.Run.STATE_SUCCEEDED
        assert "mine" in [run.run_id for run in client.list_runs()]
        assert [draw.prompt_id for draw in client.list_deferred_draws("mine")] == ["p9"]


def test_errors_are_those_of_the_server_and_a_watch_may_be_left_early(address: str) -> None:
    with Client(address) as client:
        with pytest.raises(NotFoundError):
            client.get_run("nobody")
        with pytest.raises(InvalidArgumentError) as caught:
            client.start_run("bad", {**SETTINGS, "sed": 1})
        assert dict(caught.value.violations)["sed"]
        client.start_run("left", SETTINGS)
        events = client.watch_run("left")
        assert next(events)
        events.close()
        assert client.get_run("left").run_id == "left"
    client.close()


def test_a_watch_goes_on_when_the_coordinator_comes_back(tmp_path: Path) -> None:
    address, died = f"127.0.0.1:{free_port()}", tmp_path / "died"
    revisions: list[str] = []
    with (
        Client(address, patience_seconds=60) as client,
        fake_at(address, "--die-once", str(died)) as first,
    ):
        client.start_run("mine", SETTINGS)
        events = client.watch_run("mine")
        while len(revisions) < 2:
            revisions += [e.revision for e in [next(events)] if e.revision]
        first.wait()
        with fake_at(address):
            client.start_run("mine", SETTINGS)
            revisions += [e.revision for e in events if e.revision]
    assert revisions == ["1", "2", "3", "4"]


def test_a_coordinator_that_is_away_is_told_within_the_deadline() -> None:
    client = Client(f"127.0.0.1:{free_port()}", deadline_seconds=5)
    with client, pytest.raises(UnavailableError):
        client.list_runs()


async def test_the_asyncio_client_drives_a_real_run(cluster: Cluster) -> None:
    values = run_settings(cluster.directory)
    async with coordinator(cluster) as c, connect(c.address) as client:
        await client.start_run("r", values, until_step=2)
        seen = []
        async for event in client.watch_run("r"):
            if event.HasField("step_finished"):
                seen.append(event.step_finished.step)
            elif event.run_changed.state == pb.Run.STATE_PAUSED and len(seen) == 2:
                assert await client.save_checkpoint("r") == 2
                await client.resume_run("r")
        assert seen == list(range(6))
        assert len(await client.list_samples("r", 0, last_step=5)) == 24
        assert [step.step for step in await client.list_steps("r", 2)] == [5, 4]
