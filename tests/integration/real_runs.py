"""Runs of a tiny model in a real local stack: what the proofs of the whole job share.

`running_stack` is a `LocalStack` (four services and Redis as processes) with small calls around
it; when it ends, no process that it ever had is left. A test that disturbs a run does so at a
`Moment`, a point in the life of the run that is read from Redis. Nothing here depends on how fast
a machine is: a run that is *held* pauses behind the step in which somebody waits for it, so it is
never over before its faults; who misses a state that soon ends looks for it in the next step.
What a run did is a `Trace`; two runs did the same if their traces are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf.struct_pb2 import Struct
from redis.asyncio import Redis

from rollpacker.local_stack import LocalStack
from rollpacker.local_stack.restart_policy import RestartLimits
from rollpacker.rpc.client import call, call_until, open_channel
from rollpacker.rpc.errors import UnavailableError
from rollpacker.store import keys
from rollpacker.store.redis_client import connect
from rollpacker.types import PromptGroup
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from rollpacker.v1 import rollout_service_pb2 as rollout_pb
from rollpacker.v1 import rollout_service_pb2_grpc as rollout_pb_grpc
from rollpacker.v1.trainer_service_pb2 import GetTrainerRequest, GetTrainerResponse
from rollpacker.v1.trainer_service_pb2_grpc import TrainerServiceStub
from services.coordinator.outputs import read_step_samples
from tests.integration import processes
from tests.tiny_run import run_settings

# float64 in the engine: no two scores are so close that the batch around them decides.
# Short leases: what was paused is missed soon.
_ENVIRONMENT = {
    "ROLLPACKER_ROLLOUT_DTYPE": "float64",
    "ROLLPACKER_COORDINATOR_WORKER_LEASE_SECONDS": "2",
    "ROLLPACKER_COORDINATOR_COORDINATOR_LEASE_SECONDS": "2",
}
PATIENT = RestartLimits(count=100, first_delay_seconds=0.05, longest_delay_seconds=0.1)
AWAY_SECONDS = 120.0  # how long the coordinator may take to come back
_GONE_SECONDS = 60.0  # until a process that misses its parent must have ended
_POLL_SECONDS = 0.001
_ACCUMULATING = GetTrainerResponse.STATE_ACCUMULATING
_OPEN_STATES = (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING, pb.Run.STATE_PAUSED)

OUTCOME = 1_000  # the stage of a step whose outcome is fixed and whose update is asked for
RESULT = 1_001  # the stage of a step whose update is recorded, not committed


class Moment(NamedTuple):
    """A point in the life of a run; moments of one run are in order."""

    step: int  # committed steps
    stage: int  # of the next one: groups in its sample stream, then OUTCOME, then RESULT


@dataclass(frozen=True)
class Trace:
    """What a run did: everything that timing and faults must not change."""

    schedule: list[Any]  # per step its kind, level and ordered (draw, seeds)
    responses: list[Any]  # per step its ordered (draw, index, tokens, finish reason, reward)
    metrics: list[Any]  # the lines of metrics.jsonl, without what timing may change
    weights: dict[str, bytes]  # the published versions that are kept, bit by bit


class RealStack:
    """A running stack, and the calls that tests make."""

    def __init__(self, stack: LocalStack, redis: Redis, channels: dict[str, Any]) -> None:
        """`channels`: to the coordinator, the replicas and the trainer, by process name."""
        self.stack = stack
        self.redis = redis
        self.directory = stack.layout.directory
        self._processes: dict[int, str] = {}  # every process ever seen, with its start time
        self._stub: Any = pb_grpc.CoordinatorServiceStub(channels["coordinator"])
        self._trainer: Any = TrainerServiceStub(channels["trainer-0"])
        self._replicas: dict[str, Any] = {
            name: rollout_pb_grpc.RolloutServiceStub(channel)
            for name, channel in channels.items()
            if name.startswith("rollout")
        }

    # --- runs ---------------------------------------------------------------------------------

    async def start(self, run_id: str, values: dict[str, Any], *, held: bool = False) -> None:
        """`held`: it pauses behind its first step, unless told meanwhile how far to go."""
        settings = Struct()
        settings.update(values)
        request = pb.StartRunRequest(run_id=run_id, settings=settings)
        if held:
            await self.pause("reward-0")  # no step is committed before the wish is there
        await self._call(lambda: self._stub.StartRun(request, timeout=60))
        if held:
            await self.go_on_until(run_id, 1)
            await self.go_on("reward-0")

    async def stop(self, run_id: str, mode: pb.StopMode.ValueType) -> None:
        request = pb.StopRunRequest(run_id=run_id, mode=mode)
        await self._call(lambda: self._stub.StopRun(request, timeout=60))

    async def get(self, run_id: str) -> pb.Run:
        request = pb.GetRunRequest(run_id=run_id)
        return (await self._call(lambda: self._stub.GetRun(request, timeout=60))).run

    async def go_on_until(self, run_id: str, step: int) -> None:
        """Let the run go on, and pause when so many steps are committed; 0: to its end."""
        request = pb.ResumeRunRequest(run_id=run_id, until_step=step)
        await self._call(lambda: self._stub.ResumeRun(request, timeout=60))

    async def paused_at(self, run_id: str, step: int) -> None:
        """Let the run go on until so many steps are committed; returns when it has paused there."""
        await self.go_on_until(run_id, step)
        while (run := await self.get(run_id)).state != pb.Run.STATE_PAUSED:
            self.stack.supervisor.check()
            await asyncio.sleep(0.02)
        assert run.step == step

    async def workers(self) -> set[str]:
        """Ids of the workers with a lease."""
        request = pb.ListWorkersRequest()
        answer = await self._call(lambda: self._stub.ListWorkers(request, timeout=60))
        return {worker.worker_id for worker in answer.workers}

    async def devices(self) -> dict[str, str]:
        """Who holds which device."""
        request = pb.ListDevicesRequest()
        answer = await self._call(lambda: self._stub.ListDevices(request, timeout=60))
        return {lease.device: lease.worker_id for lease in answer.leases}

    async def succeeded(self, run_id: str) -> pb.Run:
        """Let the run go on to its end, which must be a good one."""
        while (run := await self.get(run_id)).state in _OPEN_STATES:
            if run.pause_at_step or run.state == pb.Run.STATE_PAUSED:
                await self.go_on_until(run_id, 0)
            self.stack.supervisor.check()
            await asyncio.sleep(0.02)
        assert run.state == pb.Run.STATE_SUCCEEDED, run.failure
        return run

    async def failed(self, run_id: str) -> str:
        """Wait for the end of the run, which must be a bad one; returns why."""
        while (run := await self.get(run_id)).state in _OPEN_STATES:
            self.stack.supervisor.check()
            await asyncio.sleep(0.02)
        assert run.state == pb.Run.STATE_FAILED
        return run.failure

    async def run(self, run_id: str, values: dict[str, Any]) -> Trace:
        """A whole run."""
        await self.start(run_id, values)
        await self.succeeded(run_id)
        return await self.trace(run_id)

    async def steps(self, run_id: str) -> list[pb.Step]:
        request = pb.ListStepsRequest(run_id=run_id, page_size=1000)
        answer = await self._call(lambda: self._stub.ListSteps(request, timeout=60))
        return list(reversed(answer.steps))

    async def trace(self, run_id: str) -> Trace:
        steps = await self.steps(run_id)
        groups = self.samples(run_id)
        return Trace(
            schedule=[
                (step.round_kind, step.level, [(_name(d), tuple(d.seeds)) for d in step.draws])
                for step in steps
            ],
            responses=[list(map(_responses, of_step)) for of_step in groups],
            metrics=[
                {name: value for name, value in line.items() if not _depends_on_timing(name)}
                for line in self.metrics(run_id)
            ],
            weights={
                path.parent.name: path.read_bytes()
                for path in (self.directory / "weights" / run_id).glob("step_*/model.safetensors")
            },
        )

    def metrics(self, run_id: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        path = self.stack.layout.run_directory / run_id / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def samples(self, run_id: str) -> list[list[PromptGroup]]:
        """The trained groups of each step that has a samples file."""
        directory = self.stack.layout.run_directory / run_id
        steps = sorted(int(path.stem.partition("_")[2]) for path in directory.glob("samples/*"))
        assert steps == list(range(len(steps)))
        return [read_step_samples(directory, step) or [] for step in steps]

    # --- moments ------------------------------------------------------------------------------

    async def moment(self, run_id: str) -> Moment:
        """Where the run is now; it has not ended."""
        state: Any = await self.redis.hgetall(keys.state(run_id))
        assert state[b"status"] in (b"running", b"pausing", b"paused"), state
        step = int(state[b"step"])
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.exists(keys.step_result(run_id, step))
            pipe.exists(keys.step_outcome(run_id, step))
            pipe.xlen(keys.step_samples(run_id, step))
            result, outcome, groups = await pipe.execute()
        return Moment(step, RESULT if result else OUTCOME if outcome else groups)

    async def reach(self, run_id: str, moment: Moment) -> None:
        """Wait until the run is there, or past it; it pauses behind that step."""
        await self.go_on_until(run_id, moment.step + 1)
        await self.until(run_id, moment)

    async def until(self, run_id: str, moment: Moment) -> None:
        """Wait until the run is there, or past it, however far it goes."""
        while await self.moment(run_id) < moment:
            self.stack.supervisor.check()
            await asyncio.sleep(_POLL_SECONDS)

    async def decoding(self, run_id: str, step: int) -> str:
        """Wait until a replica decodes responses of that step or a later one; returns its name.

        The run pauses behind that step."""
        while True:
            await self.reach(run_id, Moment(step, 0))
            while (now := await self.moment(run_id)).step == step:
                for name, replica in self._replicas.items():
                    if await _running_responses(replica):
                        return name
                self.stack.supervisor.check()
            assert now.step > step, f"run {run_id} went back behind step {step}"
            step = now.step

    @contextlib.asynccontextmanager
    async def unrecorded(self, run_id: str, step: int) -> AsyncIterator[None]:
        """In the block the update of that step, which the run has not begun, is saved to disk and
        its result is not recorded. Whoever would go on meanwhile is stopped on the way there."""
        await self.paused_at(run_id, step)
        await self.pause("reward-0")  # the round cannot end
        await self.go_on_until(run_id, step + 1)
        while (now := await self._trainer_now()).step != step or now.state != _ACCUMULATING:
            await asyncio.sleep(_POLL_SECONDS)
        await self.pause("trainer-0")  # the update cannot begin
        await self.go_on("reward-0")
        await self.until(run_id, Moment(step, OUTCOME))
        await self.redis.execute_command("CLIENT", "PAUSE", "600000", "WRITE")
        try:
            await self.go_on("trainer-0")
            saved = self.directory / "checkpoints" / run_id / f"step_{step + 1:06d}" / "COMPLETE"
            while not saved.exists():
                self.stack.supervisor.check()
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            await self.redis.execute_command("CLIENT", "UNPAUSE")

    # --- faults -------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """kill -9 a process of the stack; returns when it runs again (it may not serve yet)."""
        self.note_processes()
        before = await self.pid(name)
        self.stack.kill(name)
        while self.stack.pids.get(name, before) == before:
            self.stack.supervisor.check()
            await asyncio.sleep(0.01)

    async def kill_rank(self, rank: int) -> None:
        """kill -9 one of several trainer processes; torchrun then ends the others."""
        self.note_processes()
        os.kill(await self.pid(f"rank-{rank}"), signal.SIGKILL)

    async def kill_rank_amid_sums(self, run_id: str, steps: range, rank: int) -> int:
        """kill -9 a trainer process while gradients of one of these steps are summed.

        The run pauses behind each of them. Returns how many groups were in the sums, or on their
        way into them; 0 where nobody was killed, as the sums of all steps were over unseen."""
        agent, pid = await self.pid("trainer-0"), await self.pid(f"rank-{rank}")
        self.note_processes()
        for step in steps:
            await self.go_on_until(run_id, step + 1)
            while (await self.moment(run_id)).step <= step:
                now = await self._trainer_now()
                summed = now.accumulated_group_count
                if now.state == _ACCUMULATING and summed:
                    await self._kill_rank(agent, pid)
                    return summed
        return 0

    async def kill_rank_amid_checkpoint(self, run_id: str, steps: range, rank: int) -> int:
        """kill -9 a trainer process while the checkpoint of one of these steps is written, which
        never becomes complete. One that became complete all the same is tried again.

        The run pauses behind each of them. Returns the step; 0 where none was hit."""
        directory = self.directory / "checkpoints" / run_id
        for step in steps:
            agent, pid = await self.pid("trainer-0"), await self.pid(f"rank-{rank}")
            self.note_processes()
            await self.go_on_until(run_id, step + 1)
            while (await self.moment(run_id)).step <= step:
                self.stack.supervisor.check()
                if (directory / f".partial-{step + 1:06d}").exists():
                    await self._kill_rank(agent, pid)
                    if not (directory / f"step_{step + 1:06d}" / "COMPLETE").exists():
                        return step
                    break
        return 0

    async def _kill_rank(self, agent: int, pid: int) -> None:
        """At once; returns when torchrun, its parent, has ended the others and itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        start = processes.start_time(agent)
        while start is not None and processes.start_time(agent) == start:
            await asyncio.sleep(_POLL_SECONDS)

    async def pid(self, name: str) -> int:
        """Of a process of the stack, or of "rank-N" of several trainer processes; waits while it
        is being started again."""
        while (pid := self._pid_now(name)) is None:
            self.stack.supervisor.check()
            await asyncio.sleep(0.01)
        return pid

    def _pid_now(self, name: str) -> int | None:
        if not name.startswith("rank-"):
            return self.stack.pids.get(name)
        rank = b"RANK=" + name.removeprefix("rank-").encode()
        if (agent := self.stack.pids.get("trainer-0")) is None:
            return None
        for pid, _ in processes.descendants(agent):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if rank in processes.environment(pid):
                    return pid
        return None

    async def pause(self, name: str) -> None:
        """SIGSTOP; returns when the process has stopped."""
        pid = await self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        while processes.state(pid) != processes.STOPPED:
            await asyncio.sleep(_POLL_SECONDS)

    async def go_on(self, name: str) -> None:
        """SIGCONT."""
        os.kill(await self.pid(name), signal.SIGCONT)

    async def until_missed(self, name: str) -> None:
        """Wait until the lease of a process that was paused has ended."""
        if name == "coordinator":
            while await self.redis.exists(keys.COORDINATOR_LEASE):
                await asyncio.sleep(0.02)
        else:
            while name in await self.workers():
                await asyncio.sleep(0.02)

    def note_processes(self) -> None:
        """Remember every process below this one."""
        self._processes |= dict(processes.descendants(os.getpid()))

    def left_processes(self) -> set[int]:
        """Those of them that are alive."""
        known = self._processes.items()
        return {pid for pid, start in known if processes.start_time(pid) == start}

    async def _trainer_now(self) -> GetTrainerResponse:
        """Waits while the trainer is started again."""
        return await call_until(
            lambda: self._trainer.GetTrainer(GetTrainerRequest(), timeout=60),
            seconds=AWAY_SECONDS,
            what="the trainer",
        )

    async def _call(self, make: Any) -> Any:
        return await call_until(make, seconds=AWAY_SECONDS, what="the coordinator")


@contextlib.asynccontextmanager
async def running_stack(
    directory: Path, *, slots: int = 64, **sizes: int
) -> AsyncIterator[RealStack]:
    """A stack of real processes; afterwards none of them is left. `slots`: of a replica."""
    async with entered_stack(LocalStack(directory, limits=PATIENT, **sizes), slots) as real:
        yield real


@contextlib.asynccontextmanager
async def entered_stack(stack: LocalStack, slots: int) -> AsyncIterator[RealStack]:
    """That stack, started; afterwards none of its processes is left."""
    outside = dict(processes.descendants(os.getpid()))
    async with contextlib.AsyncExitStack() as entered:
        patch = entered.enter_context(pytest.MonkeyPatch.context())
        for name, value in (_ENVIRONMENT | {"ROLLPACKER_ROLLOUT_SLOTS": str(slots)}).items():
            patch.setenv(name, value)
        await entered.enter_async_context(stack)
        channels = {
            name: await entered.enter_async_context(open_channel(stack.layout.address(name)))
            for name in stack.pids
            if name.startswith(("coordinator", "rollout", "trainer"))
        }
        redis = connect(stack.redis_url)
        entered.push_async_callback(redis.aclose)
        real = RealStack(stack, redis, channels)
        yield real
        real.note_processes()
    end = time.monotonic() + _GONE_SECONDS
    while left := real.left_processes() - outside.keys():
        assert time.monotonic() < end, f"processes outlive the stack: {left}"
        await asyncio.sleep(0.05)


def proof_settings(directory: Path, prompts: int, **sections: Any) -> dict[str, Any]:
    """Settings of a run whose groups differ in reward: a response that is a number is right."""
    values = run_settings(directory, prompts, **sections)
    rows = [{"prompt": f"{i}+1=", "reference": ANY_NUMBER} for i in range(prompts)]
    write_rows(directory / "train.jsonl", rows)
    return values


ANY_NUMBER = {"answer": "0", "tolerance": 1_000_000}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained_draws(trace: Trace) -> list[str]:
    """Every trained draw, in order."""
    return [draw for _, _, draws in trace.schedule for draw, _ in draws]


async def _running_responses(replica: Any) -> int:
    """How many responses a replica decodes; none while it is being started again."""
    try:
        engine = await call(lambda: replica.GetEngine(rollout_pb.GetEngineRequest(), timeout=60))
    except UnavailableError:
        return 0
    return engine.stats.running_response_count


_TIMES = ("timing_s/", "idle/", "_seconds", "_time", "_wait_s")
# How far the losers of a round had come when they were told, and what of it their drafts kept.
_OF_CUTS = (
    *("bias/uncensored_mean", "bias/ratio", "bias/weighed_ratio", "bias/shorter_again_share"),
    "alarm/length_bias",
)
_LOSERS = ("perf/", "carry/", *_OF_CUTS)


def _depends_on_timing(metric: str) -> bool:
    return metric.startswith((*_TIMES, *_LOSERS)) or metric.endswith(_TIMES)


def _name(draw: Any) -> str:
    return f"{draw.epoch}:{draw.prompt_id}"


def _responses(group: PromptGroup) -> list[Any]:
    return [
        (
            _name(group.draw),
            scored.response.index,
            scored.response.token_ids,
            scored.response.finish_reason,
            scored.reward,
        )
        for scored in group.responses
    ]
