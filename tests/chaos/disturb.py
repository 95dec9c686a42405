"""Carries a schedule of faults out on a run in real processes, with a link before each of them.

`linked_stack` is a stack whose processes reach each other through links, Redis included.
`disturb` works through the faults while the run goes on, and after each waits until every process
serves again: a fault that is not recovered from ends it with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rollpacker.local_stack import LocalStack
from tests.chaos.faults import Fault, FaultKind
from tests.chaos.link import Cut, Link
from tests.integration.real_runs import PATIENT, RealStack, entered_stack

_CUTS = {FaultKind.REFUSE: Cut.REFUSED, FaultKind.SILENCE: Cut.SILENT}


@dataclass
class LinkedStack:
    """A running stack and the links in front of its processes, by process name."""

    real: RealStack
    links: dict[str, Link]
    targets: list[str]  # what a fault may hit
    held: set[str] = field(default_factory=set)  # hit now: nothing else may hit them


@contextlib.asynccontextmanager
async def linked_stack(
    directory: Path, *, rollouts: int, rewards: int, trainers: int, slots: int
) -> AsyncIterator[LinkedStack]:
    """The stack is up inside and gone afterwards; raises AssertionError when a process is left."""
    names = [
        "coordinator",
        *(f"rollout-{index}" for index in range(rollouts)),
        *(f"reward-{index}" for index in range(rewards)),
        "trainer-0",
    ]

    def target(name: str) -> str:
        return stack.redis_url if name == "redis" else stack.layout.address(name)

    async with contextlib.AsyncExitStack() as entered:
        links = {
            name: await entered.enter_async_context(Link(partial(target, name)))
            for name in [*names, "redis"]
        }
        addresses = {name: link.address for name, link in links.items()}
        stack = LocalStack(
            directory,
            limits=PATIENT,
            links=addresses | {"redis": f"redis://{addresses['redis']}/0"},
            rollouts=rollouts,
            rewards=rewards,
            trainers=trainers,
        )
        real = await entered.enter_async_context(entered_stack(stack, slots))
        ranks = [f"rank-{rank}" for rank in range(trainers)] if trainers > 1 else []
        yield LinkedStack(real, links, [*names, "redis", *ranks])


async def disturb(
    linked: LinkedStack, run_id: str, faults: Sequence[Fault], *, held: bool = False
) -> int:
    """Carry the faults out; returns how many were recovered from. The run must still go on.

    `held`: the run does not go further than the step of the next fault before that fault; so a run
    that is faster than its faults is not over before them. It must have been started so.
    """
    recovered = 0
    lasting: list[asyncio.Task[None]] = []
    for fault in faults:
        if lasting and not fault.together:
            await asyncio.gather(*lasting)
            await linked.real.stack.wait_ready()
            recovered += len(lasting)
            lasting.clear()
        reach = linked.real.reach if held and not fault.together else linked.real.until
        await reach(run_id, fault.moment)
        await asyncio.sleep(fault.delay_seconds)
        lasting.append(asyncio.create_task(_carry_out(linked, fault)))
    await asyncio.gather(*lasting)
    await linked.real.stack.wait_ready()
    if held:
        await linked.real.go_on_until(run_id, 0)
    return recovered + len(lasting)


async def _carry_out(linked: LinkedStack, fault: Fault) -> None:
    """One fault from its begin to its end; waits while its target is being hit already."""
    while _process(fault.target) in linked.held:
        await asyncio.sleep(0.05)
    linked.held.add(_process(fault.target))
    try:
        if fault.kind is FaultKind.KILL:
            await _kill(linked.real, fault.target)
        elif fault.kind is FaultKind.PAUSE:
            await _pause(linked.real, fault)
        else:
            await _cut(linked.links[fault.target], fault)
    finally:
        linked.held.discard(_process(fault.target))


async def _kill(real: RealStack, target: str) -> None:
    if target.startswith("rank-"):
        await real.kill_rank(int(target.removeprefix("rank-")))
    else:
        await real.kill(target)


async def _pause(real: RealStack, fault: Fault) -> None:
    pid = await real.pid(fault.target)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    with contextlib.suppress(ProcessLookupError):  # its torchrun may have ended it
        os.kill(pid, signal.SIGCONT)


async def _cut(link: Link, fault: Fault) -> None:
    await link.cut(_CUTS[fault.kind])
    await asyncio.sleep(fault.seconds)
    await link.open()


def _process(target: str) -> str:
    """What supervises a target: the ranks are parts of the one trainer."""
    return "trainer-0" if target.startswith("rank-") else target
