"""How long, and how often, a reward is asked for; and how many at once."""

from __future__ import annotations

import asyncio

from rollpacker.rpc.errors import UnavailableError
from rollpacker.settings import RewardSettings
from rollpacker.types import GraderKind, Prompt
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.reward_client import RewardClient
from services.coordinator.workers import Worker, WorkerRegistry

PROMPT = Prompt("p", (1,), "1 + 1", GraderKind.CODE, "{}")


class NobodyThere(WorkerRegistry):
    """Counts how often somebody is looked for."""

    def __init__(self) -> None:
        super().__init__(lease_seconds=60.0, wait_seconds=0.0)
        self.asked = 0

    async def least_busy(self, kind: pb.WorkerKind.ValueType) -> Worker:
        self.asked += 1
        raise UnavailableError("NO_WORKER", "nobody")


async def test_services_that_are_away_are_waited_for_once_not_by_every_response() -> None:
    workers = NobodyThere()
    client = RewardClient(workers, RewardSettings(unavailable_seconds=0.5), "r")
    assert (await client.score("0", "two", PROMPT)).reward is None
    tries = workers.asked
    for number in range(1, 20):  # sent when the first one was given up
        assert (await client.score(str(number), "two", PROMPT)).reward is None
    assert workers.asked == tries + 19  # each is tried, none waits


async def test_an_absence_that_is_over_is_not_counted_on() -> None:
    workers = NobodyThere()
    settings = RewardSettings(unavailable_seconds=1.0, timeout_seconds=0.05)
    client = RewardClient(workers, settings, "r")
    await client.score("0", "two", PROMPT)
    await asyncio.sleep(0.2)  # nobody asks, so nobody knows
    tries = workers.asked
    await client.score("1", "two", PROMPT)
    assert workers.asked > tries + 1


def test_while_no_service_is_there_not_everything_is_sent() -> None:
    client = RewardClient(NobodyThere(), RewardSettings(), "r")
    assert client.room(GraderKind.CODE) == 1


async def test_who_could_not_be_reached_is_away_until_the_next_answer() -> None:
    workers = NobodyThere()
    client = RewardClient(workers, RewardSettings(unavailable_seconds=0.01), "r")
    assert client.is_away(GraderKind.CODE)  # nobody is registered
    await workers.heartbeat("reward-0", "127.0.0.1:1", pb.WORKER_KIND_REWARD, None, 1)
    assert not client.is_away(GraderKind.CODE)
    await client.score("0", "two", PROMPT)
    assert client.is_away(GraderKind.CODE)
    assert not client.is_away(GraderKind.MATH)
