"""Ladders that change all the time, wishes, rewinds and crashes: each draw is trained once.

The ladder of every second step is drawn at random in the place of the planner's. What happens in
between comes at random moments, so no two runs of this test are the same; what it asserts holds in
all of them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from rollpacker.rpc.errors import ServiceError
from rollpacker.store.records import ChosenLadder, RunState
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator import driver
from tests.contract.coordinator_cluster import Cluster, Coordinator, cluster, coordinator
from tests.contract.test_run_control import ask, update
from tests.tiny_run import run_settings

__all__ = ["cluster"]  # a fixture
PROMPTS, LIVES = 80, 4
LADDERS = ((), (2.0,), (1.25,), (1.5, 2.0), (2.0, 2.0, 2.0))


async def wish(c: Coordinator, cluster: Cluster, chance: random.Random) -> None:  # noqa: F811
    """One of the things that people, or a lost disk, do to a run."""
    match chance.randrange(7):
        case 0:
            await update(c, sampling={"temperature": chance.choice([0.7, 1.0, 1.2])})
        case 1:
            await update(c, sampling={"max_response_tokens": chance.choice([40, 44])})
        case 2:
            draws = (await ask(c, "ListDeferredDraws")).draws
            names = [pb.DrawName(epoch=d.epoch, prompt_id=d.prompt_id) for d in draws[:1]]
            await ask(c, "RequeueDraws", draws=names, level=1)
        case 3:
            await ask(c, "ForceLongRound")
        case 4:
            await ask(c, "PauseRun", mode=chance.choice([*pb.PauseMode.values()][1:]))
        case 5:
            await ask(c, "ResumeRun")
        case 6:
            disk = cluster.trainer.disk
            newest = max(disk.snapshots, default=0)
            for version in range(max(1, newest - chance.randrange(4)), newest + 1):
                disk.snapshots.pop(version, None)
                disk.results.pop(version - 1, None)
            cluster.trainer.restart()


@pytest.mark.parametrize("placement", ["separate", "colocated"])
async def test_each_draw_is_trained_once(
    cluster: Cluster,  # noqa: F811
    placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def any_ladder(_store: Any, state: RunState, _settings: Any) -> ChosenLadder | None:
        if state.step < 2 or state.step % 2:
            return None
        return ChosenLadder(state.step, random.Random(state.step).choice(LADDERS), "takes any")

    monkeypatch.setattr(driver, "chosen_ladder", any_ladder)
    chance = random.Random(placement)
    tail = {"mode": "auto", "prompts_per_step": 5, "max_deferral_age": 32, "rebalance": True}
    values = run_settings(cluster.directory, PROMPTS, tail_batching=tail, placement=placement)
    for replica in cluster.rollouts:
        replica.slots, replica.token_seconds = 12, 0.0005
    for life in range(LIVES):
        async with coordinator(cluster) as c:
            if life == 0:
                await c.start(values)
            for _ in range(4):
                await asyncio.sleep(0.2 * chance.random())
                with suppress(ServiceError):  # the run may have ended, be paused, or just begin
                    await wish(c, cluster, chance)
    async with coordinator(cluster) as c:
        while c.runs.is_starting:
            await asyncio.sleep(0.01)
        with suppress(ServiceError):
            await ask(c, "ResumeRun")
        await c.start(values)
        await c.until_ended()
        trained = Counter(draw for _, draws in await c.schedule() for draw, _ in draws)
    assert len(trained) == PROMPTS
    assert set(trained.values()) == {1}
