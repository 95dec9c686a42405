"""RewardService over a real loopback channel, with real grading workers behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollpacker.policy.timeouts import TimeoutRules
from rollpacker.rpc import client, errors
from rollpacker.types import GraderKind
from rollpacker.v1 import reward_service_pb2 as pb
from rollpacker.v1 import reward_service_pb2_grpc, types_pb2
from services.reward import worker_process
from services.reward.scheduler import RewardScheduler
from services.reward.server import SERVICE_NAME, make_server, report_graders
from services.reward.worker_pool import WorkerPool

# A power tower that no exact bound catches: computing its digits would never end.
ENDLESS = "\\boxed{\\pi^{\\pi^{\\pi^{\\pi^{\\pi^{\\pi}}}}}}"
_ENTRY = {"question": "", "answer": "2 × 3", "metadata": {"number": 6}}
NEEDS_A_WORKER = {"response_text": "\\boxed{x+1}", "reference_json": '{"answer": "1+x"}'}


@dataclass
class Service:
    """A running service and a stub to call it."""

    stub: reward_service_pb2_grpc.RewardServiceStub
    channel: grpc.aio.Channel
    pool: WorkerPool

    async def score(self, timeout: float = 60, **changes: object) -> pb.ScoreResponseResponse:
        request = score_request(**changes)
        return await client.call(lambda: self.stub.ScoreResponse(request, timeout=timeout))

    async def get(self) -> pb.GetRewardResponse:
        return await client.call(lambda: self.stub.GetReward(pb.GetRewardRequest(), timeout=60))

    async def until_busy(self, slots: int) -> None:
        async with asyncio.timeout(60):
            while (await self.get()).busy_slot_count != slots:
                await asyncio.sleep(0.01)


def score_request(**changes: object) -> pb.ScoreResponseRequest:
    fields = {
        "run_id": "run",
        "response_id": "run:0:p:0000",
        "response_text": "84,36:48,36;12,36;12,24;12,12;=12",
        "grader_kind": types_pb2.GRADER_KIND_MATH,
        "reference_json": '{"answer": "12", "answer_after": "="}',
        **changes,
    }
    return pb.ScoreResponseRequest(**fields)


@asynccontextmanager
async def running(
    slots: int = 1,
    limit: float = 30.0,
    waiting_per_slot: int = 1024,
    code: Mapping[str, Any] = MappingProxyType({}),
    checked: Sequence[GraderKind] = (),
) -> AsyncIterator[Service]:
    settings = {GraderKind.CODE: code}
    async with WorkerPool(slots, limit, waiting_per_slot, settings, checked) as pool:
        scheduler = RewardScheduler(pool, TimeoutRules(), 0.0)
        server = make_server("127.0.0.1:0", pool, scheduler)
        await server.start()
        await server.set_serving(True)
        await report_graders(server, pool)
        async with client.open_channel(server.address) as channel:
            yield Service(reward_service_pb2_grpc.RewardServiceStub(channel), channel, pool)
        await server.stop()


async def test_a_response_gets_reward_verdict_answer_and_elapsed_time() -> None:
    async with running() as service:
        right = await service.score()
        assert (right.reward, right.verdict) == (1.0, types_pb2.VERDICT_CORRECT)
        assert right.extracted_answer == "12"
        wrong = await service.score(response_text="84,36:=13")
        assert wrong.HasField("reward")
        assert (wrong.reward, wrong.verdict) == (0.0, types_pb2.VERDICT_INCORRECT)
        none = await service.score(response_text="84,36")
        assert (none.reward, none.verdict) == (0.0, types_pb2.VERDICT_NO_ANSWER)
        slow = await service.score(**NEEDS_A_WORKER)
        assert slow.verdict == types_pb2.VERDICT_CORRECT
        assert slow.elapsed.ToNanoseconds() > 0


async def health(service: Service, name: str) -> int:
    check = health_pb2.HealthCheckRequest(service=name)
    answer = await health_pb2_grpc.HealthStub(service.channel).Check(check, timeout=60)
    return int(answer.status)


async def test_code_is_run_and_its_cpu_and_wall_time_reported() -> None:
    request = {
        "grader_kind": types_pb2.GRADER_KIND_CODE,
        "response_text": "```python\nfor _ in range(10**6): pass\nprint(2 * int(input()))\n```",
        "reference_json": '{"tests": [["1", "2"], ["3", "6"]]}',
    }
    async with running(checked=[GraderKind.CODE]) as service:
        right = await service.score(**request)
        assert (right.reward, right.verdict) == (1.0, types_pb2.VERDICT_CORRECT)
        cpu = right.program_cpu.ToNanoseconds()
        # CPU and wall time come from different clocks: neither bounds the other to the microsecond.
        assert cpu > 0
        assert 0 < right.program_wall.ToNanoseconds() < right.elapsed.ToNanoseconds()
        assert dict(right.breakdown) == {"tests": 2, "tests_passed": 2}
        assert (
            await health(service, f"{SERVICE_NAME}/code") == health_pb2.HealthCheckResponse.SERVING
        )
        no_code = await service.score(**{**request, "response_text": "I do not know"})
        assert no_code.verdict == types_pb2.VERDICT_NO_CODE
        assert not no_code.HasField("program_cpu")


_WORKER_WITHOUT_SECCOMP = """
from services.reward import grading_worker
from services.reward.sandbox.inside import seccomp
seccomp.install()  # under it, no further filter can be installed
grading_worker.main()
"""


async def test_without_seccomp_mathematics_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "_COMMAND", (sys.executable, "-c", _WORKER_WITHOUT_SECCOMP))
    async with running() as service:
        with pytest.raises(errors.FailedPreconditionError, match="seccomp") as caught:
            await service.score()
        assert caught.value.reason == "GRADER_UNAVAILABLE"
        statuses = health_pb2.HealthCheckResponse
        assert await health(service, f"{SERVICE_NAME}/math") == statuses.NOT_SERVING
        assert await health(service, SERVICE_NAME) == statuses.SERVING
        offer = await service.get()
        assert types_pb2.GRADER_KIND_MATH not in offer.grader_kinds
        reasons = {it.grader_kind: it.reason for it in offer.unavailable_graders}
        assert "deploy/seccomp.json" in reasons[types_pb2.GRADER_KIND_MATH]


async def test_without_a_sandbox_code_is_refused_by_name_and_mathematics_goes_on() -> None:
    code = {"sandbox": {"bwrap": "/nowhere/bwrap"}}
    async with running(code=code, checked=[GraderKind.CODE]) as service:
        with pytest.raises(errors.FailedPreconditionError, match="SANDBOX_BWRAP") as caught:
            await service.score(
                grader_kind=types_pb2.GRADER_KIND_CODE,
                response_text="```python\nprint(1)\n```",
                reference_json='{"tests": [["", "1"]]}',
            )
        assert caught.value.reason == "GRADER_UNAVAILABLE"
        statuses = health_pb2.HealthCheckResponse
        assert await health(service, f"{SERVICE_NAME}/code") == statuses.NOT_SERVING
        assert await health(service, SERVICE_NAME) == statuses.SERVING
        assert (await service.score()).reward == 1.0
        offer = await service.get()
        assert types_pb2.GRADER_KIND_CODE not in offer.grader_kinds
        (missing,) = offer.unavailable_graders
        assert missing.grader_kind == types_pb2.GRADER_KIND_CODE
        assert "SANDBOX_BWRAP" in missing.reason


async def test_a_burst_of_programs_waits_without_using_up_any_time_limit() -> None:
    code = {"timeouts": {"min_seconds": 1.0, "max_seconds": 1.0}}
    request = {
        "grader_kind": types_pb2.GRADER_KIND_CODE,
        "response_text": "```python\nprint(2 * int(input()))\n```",
        "reference_json": '{"tests": [["1", "2"]]}',
    }
    async with running(slots=2, code=code) as service:
        scores = await asyncio.gather(*(service.score(timeout=250, **request) for _ in range(200)))
        assert {score.verdict for score in scores} == {types_pb2.VERDICT_CORRECT}
        assert (await service.get()).worker_restart_count == 0


async def test_a_repeat_scores_the_same() -> None:
    async with running() as service:
        first, second = [await service.score(**NEEDS_A_WORKER) for _ in range(2)]
        first.ClearField("elapsed")
        second.ClearField("elapsed")
        assert first == second


async def test_an_extracted_answer_is_cut_to_200_characters() -> None:
    async with running() as service:
        scored = await service.score(response_text="=" + "7" * 1000)
        assert len(scored.extracted_answer) == 200


@pytest.mark.parametrize(
    ("changes", "field", "what"),
    [
        ({"grader_kind": types_pb2.GRADER_KIND_UNSPECIFIED}, "grader_kind", "unset"),
        ({"grader_kind": 99}, "grader_kind", "99"),
        (
            {"grader_kind": types_pb2.GRADER_KIND_CODE, "response_text": "```python\n1\n```"},
            "reference_json",
            "answer: unknown key; code knows",
        ),
        ({"reference_json": "{"}, "reference_json", "JSON"),
        ({"reference_json": "{}"}, "reference_json", "answer"),
        ({"reference_json": f'{{"answer": ["{"é" * 9999}"]}}'}, "reference_json", "answer: ['éé"),
        (
            {
                "grader_kind": types_pb2.GRADER_KIND_REASONING_GYM,
                "reference_json": '{"dataset": "gdc", "entry": {"answer": "1"}}',
            },
            "reference_json",
            "gdc",
        ),
    ],
)
async def test_a_wrong_request_is_invalid_argument_that_names_the_field(
    changes: dict[str, object], field: str, what: str
) -> None:
    async with running() as service:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await service.score(**changes)
        ((name, message),) = caught.value.violations
        assert name == field
        assert what in message


async def test_a_failing_scorer_is_internal_and_never_a_reward() -> None:
    reference = json.dumps({"dataset": "prime_factorization", "entry": _ENTRY})
    async with running() as service:
        with pytest.raises(errors.InternalError, match="prime_factorization") as caught:
            await service.score(
                grader_kind=types_pb2.GRADER_KIND_REASONING_GYM,
                reference_json=reference,
                response_text="two times three",
            )
        assert caught.value.reason == "GRADER_FAILED"
        assert "run:0:p:0000" in caught.value.message


async def test_reasoning_gym_is_graded_where_the_home_directory_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: matplotlib, which it imports, finds no settings of its own there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    reference = {"dataset": "prime_factorization", "entry": _ENTRY}
    async with running() as service:
        scored = await service.score(
            grader_kind=types_pb2.GRADER_KIND_REASONING_GYM,
            reference_json=json.dumps(reference),
            response_text="<answer>2 × 3</answer>",
        )
        assert scored.reward == 1.0
    assert not list(tmp_path.iterdir())


async def test_a_power_tower_is_timed_out_and_the_next_request_works() -> None:
    async with running(limit=0.3) as service:
        tower = await service.score(response_text=ENDLESS, reference_json='{"answer": "4"}')
        assert (tower.reward, tower.verdict) == (0.0, types_pb2.VERDICT_TIMED_OUT)
        assert (await service.score(**NEEDS_A_WORKER)).reward == 1.0
        assert (await service.get()).worker_restart_count == 1


async def test_a_full_line_is_resource_exhausted_with_a_delay_for_the_retry() -> None:
    endless = {"response_text": ENDLESS, "reference_json": '{"answer": "4"}'}
    async with running(limit=1000, waiting_per_slot=1) as service:
        calls = [asyncio.create_task(service.score(**endless)) for _ in range(8)]
        done, pending = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().exception()
        assert isinstance(error, errors.ResourceExhaustedError)
        assert error.reason == "SLOTS_BUSY"
        assert error.retry_after_seconds
        assert error.retry_after_seconds > 0
        assert (await service.score()).reward == 1.0  # what needs no worker needs no slot
        for call in calls:
            call.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def test_a_worker_that_dies_twice_is_unavailable_worker_lost() -> None:
    async with running(limit=1000) as service:
        call = asyncio.create_task(
            service.score(response_text=ENDLESS, reference_json='{"answer": "4"}')
        )
        killed: set[int] = set()
        while len(killed) < 2:
            await service.until_busy(1)
            for pid in set(service.pool.worker_pids) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        with pytest.raises(errors.UnavailableError) as caught:
            await call
        assert caught.value.reason == "WORKER_LOST"
        assert (await service.score(**NEEDS_A_WORKER)).reward == 1.0


async def test_a_deadline_ends_the_call_and_the_slot_comes_back() -> None:
    async with running(limit=1.0) as service:
        with pytest.raises(errors.DeadlineExceededError):
            await service.score(
                timeout=0.2, response_text=ENDLESS, reference_json='{"answer": "4"}'
            )
        assert (await service.score(**NEEDS_A_WORKER)).reward == 1.0


async def test_a_cancelled_call_leaves_the_line() -> None:
    async with running(limit=1.0) as service:
        endless = score_request(response_text=ENDLESS, reference_json='{"answer": "4"}')
        calls = [service.stub.ScoreResponse(endless, timeout=60) for _ in range(20)]
        await service.until_busy(1)
        for call in calls:
            call.cancel()
        assert (await service.score(**NEEDS_A_WORKER)).reward == 1.0
        assert (await service.get()).worker_restart_count <= 1  # nineteen of them never ran


async def test_two_thousand_at_once_all_succeed_on_two_slots() -> None:
    async with running(slots=2) as service:
        quick = [service.score(timeout=250) for _ in range(1000)]
        slow = [service.score(timeout=250, **NEEDS_A_WORKER) for _ in range(1000)]
        scores = await asyncio.gather(*quick, *slow)
        assert {score.reward for score in scores} == {1.0}
        assert (await service.get()).worker_restart_count == 0


async def test_a_response_over_4_mib_is_scored() -> None:
    async with running() as service:
        assert (await service.score(response_text="x" * 5_000_000 + "=12")).reward == 1.0


async def test_get_reward_says_what_is_offered_and_how_busy_it_is() -> None:
    async with running(slots=2, limit=1000) as service:
        idle = await service.get()
        assert list(idle.grader_kinds) == [
            types_pb2.GRADER_KIND_MATH,
            types_pb2.GRADER_KIND_CODE,
            types_pb2.GRADER_KIND_CUSTOM,
            types_pb2.GRADER_KIND_JUDGE,
            types_pb2.GRADER_KIND_REASONING_GYM,
        ]
        assert (idle.slot_count, idle.busy_slot_count, idle.worker_restart_count) == (2, 0, 0)
        call = asyncio.create_task(
            service.score(response_text=ENDLESS, reference_json='{"answer": "4"}')
        )
        await service.until_busy(1)
        call.cancel()


async def test_the_process_serves_and_leaves_no_child_when_it_is_told_to_stop(
    tmp_path: Path,
) -> None:
    address_file = tmp_path / "address"
    environment = {
        **os.environ,
        "ROLLPACKER_REWARD_WORKER_ID": "reward-0",
        "ROLLPACKER_REWARD_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "ROLLPACKER_REWARD_ADDRESS_FILE": str(address_file),
        "ROLLPACKER_REWARD_SLOTS": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.reward"], env=environment)
    try:
        async with asyncio.timeout(60):
            while not address_file.exists():
                assert process.poll() is None
                await asyncio.sleep(0.05)
        async with client.open_channel(address_file.read_text()) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            answer = await health.Check(check, timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        children = _children(process.pid)
        assert len(children) == 2  # a sealed worker and an open one, in one slot
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    finally:
        process.kill()
        process.wait()


def _children(pid: int) -> list[int]:
    return [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text(encoding="ascii").split()
    ]
