"""A run for the tests of the web page: files and state as a coordinator leaves them, served."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from rollpacker.local_stack.ports import free_port
from rollpacker.store.records import RunState
from rollpacker.store.run_store import RunStore
from rollpacker.tasks import end_tasks
from rollpacker.types import DeferredDraw, PromptGroup
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.outputs import RunOutputs
from services.coordinator.runs import Runs
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.web import serve_web
from services.coordinator.workers import WorkerRegistry
from tests.tiny_run import run_settings, write_tokenizer
from tests.unit.outputs_example_run import RUN_ID, ExampleRun

TOKEN = "t" * 32
HOSTILE = "</pre><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>\u202e"


@dataclass
class Site:
    """The page of one run, and the run behind it."""

    url: str
    runs: Runs
    workers: WorkerRegistry
    outputs: RunOutputs
    store: RunStore
    state: RunState
    example: ExampleRun = field(default_factory=ExampleRun)

    async def commit(self, count: int, text: str = "") -> None:
        """The next steps; `text` replaces that of every response."""
        for played, trained in self.example.steps(count):
            groups = [_saying(group, text) for group in trained] if text else trained
            record = dataclasses.replace(played, draws=tuple(group.draw for group in groups))
            self.outputs.write_step(record, groups)
            deferred = tuple(
                DeferredDraw(draw, (5,) * len(draw.seeds), (False,) * len(draw.seeds))
                for queue in self.example.queues.values()
                for draw in queue
            )
            self.state = dataclasses.replace(self.state, step=record.step + 1, deferred=deferred)
            await self.store.commit(1, self.state, record)


def _saying(group: PromptGroup, text: str) -> PromptGroup:
    draw = dataclasses.replace(group.draw, prompt_id=group.draw.prompt_id + text)
    responses = tuple(dataclasses.replace(one, text=text) for one in group.responses)
    return dataclasses.replace(group, draw=draw, responses=responses)


@asynccontextmanager
async def served_run(redis: Redis, directory: Path) -> AsyncIterator[Site]:
    """A page on loopback; the run has no step yet."""
    write_tokenizer(directory / "model")
    (directory / "token").write_text(TOKEN + "\n")
    settings = CoordinatorSettings(redis_url="unused", run_directory=directory / "runs")
    values = run_settings(directory)
    state = RunState(RUN_ID, values, create_time=1.0, planned_steps=100)
    store = RunStore(redis, RUN_ID)
    await store.create(state)
    workers = WorkerRegistry(600, 600)
    await workers.heartbeat("reward-0", "127.0.0.1:1", pb.WORKER_KIND_REWARD, None)
    runs = Runs(redis, settings, workers)
    outputs = RunOutputs(runs.directory(RUN_ID), RUN_ID, "exact", values)
    address = f"127.0.0.1:{free_port()}"
    serving = asyncio.create_task(serve_web(address, directory / "token", runs, workers))
    await asyncio.sleep(0)  # it listens from its first step on
    try:
        yield Site(f"http://{address}", runs, workers, outputs, store, state)
    finally:
        await end_tasks(serving)
        await workers.close()
