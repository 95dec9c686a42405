"""The pool of grading workers, with real worker processes: time limits, deaths, the line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import BadReferenceError, GraderFailedError, GradingTask
from services.reward.worker_pool import SlotsBusyError, WorkerPool
from services.reward.worker_process import WorkerLostError

# A power tower that no exact bound catches: computing its digits would never end.
TOWER = "\\pi^{\\pi^{\\pi^{\\pi^{\\pi^{\\pi}}}}}"
ENDLESS = GradingTask(GraderKind.MATH, f"\\boxed{{{TOWER}}}", '{"answer": "4"}')
# Needs algebra, so it needs a worker.
QUICK = GradingTask(GraderKind.MATH, "\\boxed{x+1}", '{"answer": "1+x"}')
FOR_EVER = 1000.0


@asynccontextmanager
async def running(
    slots: int, limit: float, waiting_per_slot: int = 1024
) -> AsyncIterator[WorkerPool]:
    async with WorkerPool(slots, limit, waiting_per_slot) as pool:
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def verdict(pool: WorkerPool, task: GradingTask) -> Verdict:
    return (await pool.grade(task)).score.verdict


async def test_a_response_over_its_limit_costs_its_limit_and_one_restart() -> None:
    async with running(1, 0.3) as pool:
        outcome = await pool.grade(ENDLESS)
        assert (outcome.score.reward, outcome.score.verdict) == (0.0, Verdict.TIMED_OUT)
        assert await verdict(pool, QUICK) is Verdict.CORRECT
        assert pool.worker_restart_count == 1


async def test_a_worker_killed_in_the_middle_costs_a_retry_on_a_fresh_one() -> None:
    async with running(1, 1.0) as pool:
        grading = asyncio.create_task(verdict(pool, ENDLESS))
        await until(lambda: pool.busy_slot_count == 1)
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        assert await grading is Verdict.TIMED_OUT  # its second attempt ran to the limit
        assert await verdict(pool, QUICK) is Verdict.CORRECT
        assert pool.worker_restart_count == 2


async def test_a_response_that_loses_two_workers_is_lost_not_zero() -> None:
    async with running(1, FOR_EVER) as pool:
        grading = asyncio.create_task(pool.grade(ENDLESS))
        await until(lambda: pool.busy_slot_count == 1)
        (first,) = pool.worker_pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: pool.worker_pids not in ([], [first]))
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="-9"):
            await grading
        assert await verdict(pool, QUICK) is Verdict.CORRECT


async def test_a_worker_that_dies_while_idle_is_replaced_unnoticed() -> None:
    async with running(1, 5.0) as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert await verdict(pool, QUICK) is Verdict.CORRECT
        assert pool.worker_restart_count == 1


async def test_waiting_in_the_line_uses_up_no_time_limit() -> None:
    async with running(2, 0.5) as pool:
        verdicts = await asyncio.gather(*(verdict(pool, QUICK) for _ in range(1000)))
        assert set(verdicts) == {Verdict.CORRECT}
        assert pool.worker_restart_count == 0


async def test_a_full_line_refuses_at_once_and_says_when_to_try_again() -> None:
    async with running(1, FOR_EVER, waiting_per_slot=1) as pool:
        running_one = asyncio.create_task(pool.grade(ENDLESS))
        await until(lambda: pool.busy_slot_count == 1)
        waiting = asyncio.create_task(pool.grade(QUICK))
        await asyncio.sleep(0)
        with pytest.raises(SlotsBusyError) as caught:
            await pool.grade(QUICK)
        assert 0 < caught.value.retry_after_seconds <= 5
        await pool.stop()
        for task in (running_one, waiting):
            with pytest.raises(WorkerLostError, match="stops"):
                await task


async def test_a_caller_that_gives_up_takes_its_response_out_of_the_line() -> None:
    async with running(1, 0.3) as pool:
        blocking = asyncio.create_task(verdict(pool, ENDLESS))
        await until(lambda: pool.busy_slot_count == 1)
        abandoned = [asyncio.create_task(pool.grade(ENDLESS)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in abandoned:
            task.cancel()
        assert await verdict(pool, QUICK) is Verdict.CORRECT
        assert await blocking is Verdict.TIMED_OUT
        assert pool.worker_restart_count == 1  # none of the fifty ran


async def test_errors_of_reference_and_scorer_reach_the_caller_and_keep_the_worker() -> None:
    def gym(dataset: str, response: str, answer: str) -> GradingTask:
        entry = {"question": "", "answer": answer, "metadata": {"numbers": [1], "target": 1}}
        reference = json.dumps({"dataset": dataset, "entry": entry})
        return GradingTask(GraderKind.REASONING_GYM, response, reference)

    async with running(1, 30.0) as pool:
        assert await verdict(pool, gym("gcd", "12", "12")) is Verdict.CORRECT
        with pytest.raises(BadReferenceError, match="nonsense"):
            await pool.grade(gym("nonsense", "12", "12"))
        with pytest.raises(GraderFailedError, match="prime_factorization"):
            await pool.grade(gym("prime_factorization", "twelve", "12"))
        with pytest.raises(GraderFailedError, match=r"countdown.*evaluate text as Python"):
            await pool.grade(gym("countdown", "<answer>1+0</answer>", "1"))
        assert pool.worker_restart_count == 0


async def test_no_process_is_left_after_stop() -> None:
    async with running(2, FOR_EVER) as pool:
        pids = pool.worker_pids
        lost = [asyncio.create_task(pool.grade(ENDLESS)) for _ in range(3)]
        await until(lambda: pool.busy_slot_count == 2)
        await pool.stop()
        assert [pid for pid in pids if is_alive(pid)] == []
        results = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(result, WorkerLostError) for result in results)


_DOOMED = """
import asyncio
from services.reward.worker_pool import WorkerPool
from tests.unit.test_reward_worker_pool import ENDLESS, FOR_EVER
async def main():
    async with WorkerPool(2, FOR_EVER) as pool:
        asyncio.create_task(pool.grade(ENDLESS))
        while not pool.busy_slot_count:
            await asyncio.sleep(0.01)
        print(*pool.worker_pids, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_workers_die_with_a_service_that_is_killed_even_in_the_middle_of_a_task() -> None:
    service = subprocess.Popen([sys.executable, "-c", _DOOMED], stdout=subprocess.PIPE, text=True)
    assert service.stdout
    pids = [int(word) for word in (await asyncio.to_thread(service.stdout.readline)).split()]
    assert len(pids) == 2
    service.kill()
    service.communicate()
    await until(lambda: not any(map(_runs, pids)))


def _runs(pid: int) -> bool:
    """Alive and no zombie (an orphan's zombie waits for the init process of the host)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
