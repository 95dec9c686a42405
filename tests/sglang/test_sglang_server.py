"""SGLang that dies, does not know seeds, is attached to, or is too old."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rollpacker.local_stack.ports import free_port
from rollpacker.local_stack.restart_policy import RestartLimits
from services.rollout.engine import EngineError, GenerationResult
from services.rollout.sglang_engine import SglangEngine, launch, served_model
from services.rollout.sglang_engine.server_process import ServerProcess
from services.rollout.torch_engine import TorchEngine
from tests.engine_contract import ENDLESS, KV_BUDGET, Subject, essence, seeded
from tests.sglang_support import options

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


def scheduler_of(server: int) -> int:
    """The process id of the scheduler in the process group of a server."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != server:
            try:
                name = (entry / "cmdline").read_bytes()
                if b"scheduler" in name and os.getpgid(int(entry.name)) == server:
                    return int(entry.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
    raise AssertionError(f"server {server} has no scheduler")


async def test_a_killed_or_hanging_scheduler_comes_back_within_limits(directories, caplog):
    """What ran goes on exactly; after the last restart the engine has failed for good."""
    engine = SglangEngine(options(silence_seconds=5.0), RestartLimits(count=2))
    subject = Subject(engine, *directories)
    requests = seeded(4, stop_token_ids=ENDLESS, max_response_tokens=450)

    async def disturbed(number: signal.Signals) -> dict[str, GenerationResult]:
        stream = engine.generate(requests, 10)
        events = [await anext(stream)]
        os.kill(scheduler_of(engine.server_pid), number)
        events += [event async for event in stream]
        return {e.request_id: e for e in events if isinstance(e, GenerationResult)}

    try:
        await engine.load_weights(directories[0])
        whole = await subject.run(requests)
        for losses, number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            results = await disturbed(number)
            assert {n: essence(r) for n, r in results.items()} == {
                n: essence(r) for n, r in whole.items()
            }
            told = [r.getMessage() for r in caplog.records if "SGLang up again" in r.getMessage()]
            assert len(told) == losses
        assert "the scheduler of SGLang has been silent" in told[-1]
        with pytest.raises(EngineError, match="SGLang keeps failing"):
            await disturbed(signal.SIGKILL)
        assert "SGLang keeps failing" in str(await asyncio.wait_for(engine.wait_failed(), 60))
        with pytest.raises(EngineError, match="SGLang keeps failing"):
            await engine.load_weights(directories[0])
    finally:
        await engine.close()


async def test_two_ranks_sample_what_the_embedded_engine_samples(directories):
    requests = seeded(24, stop_token_ids=ENDLESS)
    ours = TorchEngine(slots=64, kv_budget_tokens=KV_BUDGET)
    theirs = SglangEngine(options())
    try:
        await ours.load_weights(directories[1])
        await theirs.load_weights(directories[1], tensor_parallel_size=2)
        assert theirs.replays_by_seed
        expected = await Subject(ours, *directories).run(requests)
        results = await Subject(theirs, *directories).run(requests)
    finally:
        await ours.close()
        await theirs.close()
    parted = [name for name in expected if essence(expected[name]) != essence(results[name])]
    assert all(expected[name].near_tie_count > 0 for name in parted)
    assert len(parted) <= 1


async def test_an_attached_server_that_ignores_seeds_is_found_out(directories, tmp_path):
    port = free_port()
    asked = options()
    shown = served_model.show(served_model.read_directory(directories[1]), tmp_path / "shown")
    command = launch.command(asked, shown, port, 1)
    command.remove("--enable-deterministic-inference")
    log = tmp_path / "log"
    server = await ServerProcess.start(command, launch.environment(asked, 1), log)
    engine = SglangEngine(options(url=f"http://127.0.0.1:{port}"))
    try:
        await engine.load_weights(directories[0])
        assert not engine.replays_by_seed
        results = await Subject(engine, *directories).run(seeded(4, max_response_tokens=5))
        assert len(results) == 4
    finally:
        await engine.close()
        assert not server.ended, server.tail()
        await server.kill()


async def test_an_old_version_is_refused_with_its_number(directories, tmp_path):
    """The real interpreter, with metadata of an older release first on its path."""
    old = tmp_path / "sglang-0.5.20.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    engine = SglangEngine(options(environment={"PYTHONPATH": str(tmp_path)}))
    try:
        with pytest.raises(EngineError, match=r"SGLang 0\.5\.20 is not supported"):
            await engine.load_weights(directories[0])
    finally:
        await engine.close()
