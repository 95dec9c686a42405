"""The rollout replicas of one round: brought to the round's weights, then handed to the round.

A replica is *serving* from the moment ApplyEngineSpec has returned until it is lost: its lease
ended, its stream broke, or it answered that it serves other weights. A lost replica is brought up
again and joins anew; so does one that registers in the middle of a round. A *released* one is not,
before the next round, unless no other is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial

import grpc.aio

from rollpacker import wire
from rollpacker.policy.events import Event, ReplicaJoined, ReplicaLost
from rollpacker.rpc.client import call
from rollpacker.rpc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    ServiceError,
    UnavailableError,
)
from rollpacker.tasks import end_tasks
from rollpacker.types import EngineSpec
from rollpacker.v1 import coordinator_service_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from services.coordinator.workers import Worker, WorkerRegistry

_APPLY_SECONDS = 600.0  # loading weights and building the model
_RELEASE_SECONDS = 60.0
_STATS_SECONDS = 10.0
_POLL_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
_TOGETHER_SECONDS = 0.2  # that the first replica waits for others to get ready
_log = logging.getLogger(__name__)


class ReplicaSet:
    """The replicas of a run, at one spec."""

    def __init__(
        self,
        workers: WorkerRegistry,
        spec: EngineSpec,
        fence: int,
        *,
        needs_replay: bool,
        group_count: int,
        response_count: int,
        expected_count: int = 0,
    ) -> None:
        """`group_count` groups of `response_count` responses are to be shared out, among
        `expected_count` replicas: not all that are alive have devices at every size. 0: all."""
        self._workers = workers
        self._group_count = group_count
        self._response_count = response_count
        self._expected_count = expected_count
        self._spec = spec
        self._fence = fence
        self._needs_replay = needs_replay
        self._serving: dict[str, Worker] = {}
        self._limits: dict[str, rollout_service_pb2.EngineStats] = {}  # of those that ever served
        self._released: set[str] = set()
        self._joining: list[str] = []  # ready, and not yet handed to the round
        self._join_later: asyncio.TimerHandle | None = None
        self._bringing_up: dict[str, asyncio.Task[None]] = {}
        self._none_since = time.monotonic()  # since when no replica serves
        self.first_ready_at: float | None = None  # monotonic
        self.slowest_apply_seconds = 0.0

    def serving(self) -> list[str]:
        """Ids of the replicas that take work."""
        return sorted(self._serving)

    @property
    def served_count(self) -> int:
        """Replicas that have served."""
        return len(self._limits)

    def channel(self, replica_id: str) -> grpc.aio.Channel:
        """Where a serving replica is. Raises UnavailableError when it was lost in between."""
        worker = self._serving.get(replica_id)
        if worker is None:
            raise UnavailableError("REPLICA_LOST", f"replica {replica_id} does not serve any more")
        return worker.channel

    def waves(self, replica_id: str, responses: int) -> int:
        """How often a replica must run what its slots hold, to run so many responses."""
        return -(-responses // max(1, self._limits[replica_id].slot_count))

    def lost(self, replica_id: str) -> bool:
        """Forget a replica; False if it was not serving."""
        return self._serving.pop(replica_id, None) is not None

    async def preemptions(self) -> int:
        """Of the replicas that serve now, since they joined; those that do not answer count 0."""
        found = await asyncio.gather(*(self._preemptions(name) for name in self.serving()))
        return sum(found)

    async def release(self, replica_id: str, tell: Callable[[Event | BaseException], None]) -> None:
        """Let a replica give its memory up: it hands back what it runs, and takes no more.

        Those that are kept may then run all that their slots hold. Raises ServiceError.
        """
        channel = self.channel(replica_id)
        self._released.add(replica_id)
        for name in self.serving():
            if name not in self._released:
                tell(self._joined(name, self._limits[name].slot_count))
        spec = dataclasses.replace(self._spec, resident=False)
        request = rollout_service_pb2.ApplyEngineSpecRequest(
            spec=wire.engine_spec_to_proto(spec), fence=self._fence
        )
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        await call(lambda: stub.ApplyEngineSpec(request, timeout=_RELEASE_SECONDS))

    async def run(self, tell: Callable[[Event | BaseException], None]) -> None:
        """Bring replicas up and watch their leases, until cancelled."""
        try:
            while True:
                self._check_leases(tell)
                await self._workers.wait_for_change(_POLL_SECONDS)
        finally:
            await end_tasks(*self._bringing_up.values())
            if self._join_later is not None:
                self._join_later.cancel()

    def _check_leases(self, tell: Callable[[Event | BaseException], None]) -> None:
        alive = {
            worker.worker_id: worker
            for worker in self._workers.alive(coordinator_service_pb2.WORKER_KIND_ROLLOUT)
        }
        for name in [n for n, worker in self._serving.items() if alive.get(n) is not worker]:
            self.lost(name)
            _log.warning("replica %s is lost: its lease ended, or it moved", name)
            tell(ReplicaLost(time.monotonic(), name))
        if not self._serving and not self._bringing_up:
            self._released.clear()
        for name, worker in alive.items():
            known = (*self._serving, *self._bringing_up, *self._released)
            if name not in known:
                task = asyncio.create_task(self._bring_up(worker, tell))
                task.add_done_callback(partial(_tell_failure, tell))
                self._bringing_up[name] = task
        if self._serving:
            self._none_since = time.monotonic()
        elif not alive:
            self._give_up_after_a_while("no rollout worker is there", tell)

    def _give_up_after_a_while(
        self, what: str, tell: Callable[[Event | BaseException], None]
    ) -> None:
        waited = time.monotonic() - self._none_since
        if waited > self._workers.wait_seconds:
            tell(
                UnavailableError(
                    "NO_WORKER", f"{what} ({waited:.0f} s); start one, or look at its log"
                )
            )

    async def _bring_up(
        self, worker: Worker, tell: Callable[[Event | BaseException], None]
    ) -> None:
        """A replica that is away is tried again; one that refuses the spec ends the round."""
        try:
            stats = await self._apply(worker)
        except (UnavailableError, DeadlineExceededError, InternalError) as error:
            expected = error.reason == "DEVICES_BUSY" and bool(self._serving)
            level = logging.INFO if expected else logging.WARNING
            _log.log(level, "replica %s does not come up: %s", worker.worker_id, error)
            if not self._serving:
                self._give_up_after_a_while(f"no replica comes up, the last one: {error}", tell)
            await asyncio.sleep(_PAUSE_SECONDS)
        except ServiceError as error:
            tell(error)
            return
        else:
            self._serving[worker.worker_id] = worker
            self._limits[worker.worker_id] = stats
            self.first_ready_at = self.first_ready_at or time.monotonic()
            self._joining.append(worker.worker_id)
            if len(self._bringing_up) > 1 and len(self._joining) == 1:
                loop = asyncio.get_running_loop()
                self._join_later = loop.call_later(_TOGETHER_SECONDS, self._join, tell)
        del self._bringing_up[worker.worker_id]
        if not self._bringing_up:
            self._join(tell)

    def _join(self, tell: Callable[[Event | BaseException], None]) -> None:
        """Hand those that are ready to the round, at once: so it can share the groups out by their
        expected lengths, instead of giving the first one its share of the longest."""
        if self._join_later is not None:
            self._join_later.cancel()
        names = [name for name in dict.fromkeys(self._joining) if name in self._serving]
        self._joining.clear()
        for name in names:
            capacity = min(max(1, self._limits[name].slot_count), self._fair_share())
            joined = self._joined(name, capacity)
            tell(dataclasses.replace(joined, others_follow=name != names[-1]))

    def _joined(self, replica_id: str, response_capacity: int) -> ReplicaJoined:
        limits = self._limits[replica_id]
        return ReplicaJoined(
            time.monotonic(),
            replica_id,
            response_capacity,
            limits.kv_budget_tokens,
            weight_kv_tokens=limits.weight_kv_tokens,
        )

    async def _preemptions(self, replica_id: str) -> int:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(self.channel(replica_id))
        request = rollout_service_pb2.GetEngineRequest()
        try:
            engine = await call(lambda: stub.GetEngine(request, timeout=_STATS_SECONDS))
        except ServiceError as error:
            _log.warning("replica %s does not tell its preemptions: %s", replica_id, error)
            return 0
        before = self._limits[replica_id].preemption_count
        return max(0, engine.stats.preemption_count - before)

    def _fair_share(self) -> int:
        """Responses of a replica when all take equally many groups: the first one that is ready
        must not take the work of those that are still coming up."""
        count = len(self._workers.alive(coordinator_service_pb2.WORKER_KIND_ROLLOUT))
        if self._expected_count:
            count = min(count, self._expected_count)
        return -(-self._group_count // max(1, count)) * self._response_count

    async def _apply(self, worker: Worker) -> rollout_service_pb2.EngineStats:
        """Bring one replica to the spec; returns its limits."""
        stub = rollout_service_pb2_grpc.RolloutServiceStub(worker.channel)
        trainers = self._workers.alive(coordinator_service_pb2.WORKER_KIND_TRAINER)
        address = trainers[0].address if trainers else ""
        spec = dataclasses.replace(self._spec, weights_address=address)
        request = rollout_service_pb2.ApplyEngineSpecRequest(
            spec=wire.engine_spec_to_proto(spec), fence=self._fence
        )
        applied = await call(lambda: stub.ApplyEngineSpec(request, timeout=_APPLY_SECONDS))
        self.slowest_apply_seconds = max(self.slowest_apply_seconds, applied.seconds)
        engine = await call(
            lambda: stub.GetEngine(rollout_service_pb2.GetEngineRequest(), timeout=30)
        )
        if self._needs_replay and not engine.replays_by_seed:
            raise FailedPreconditionError(
                "NO_REPLAY",
                f"replica {worker.worker_id} ({engine.engine_kind}) does not replay by seed, which"
                " mode exact or auto needs; choose another mode or engine",
            )
        if self._spec.tensor_parallel_size and not engine.changes_tensor_parallel_size:
            raise FailedPreconditionError(
                "NO_RESIZE",
                f"replica {worker.worker_id} ({engine.engine_kind}) cannot change its tensor-"
                "parallel size; leave out tail_batching.max_tensor_parallel_size, or launch SGLang",
            )
        return engine.stats


def _tell_failure(tell: Callable[[Event | BaseException], None], task: asyncio.Task[None]) -> None:
    """An unforeseen failure of a task ends the round instead of leaving it waiting."""
    if not task.cancelled() and (error := task.exception()) is not None:
        tell(error)
