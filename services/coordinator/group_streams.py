"""The streams of a round: one gRPC stream per running group, and what they bring.

    launch --> stream --progress, finished responses--> events
                  |---ended early: the replica is draining---> ReplicaDraining, GroupInterrupted
                  |---broken, the replica is away------------> ReplicaLost
                  |---broken otherwise-----------------------> GroupInterrupted, or an error
    abort, end --> cancelled: says nothing more

A replica that ends its streams early takes no more work; when its last stream has ended it counts
as lost, and is brought up again if it is alive. What a stream had so far is kept (`carry_over`).
What never happens: two streams of one draw at a time; an invalid response is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable

from rollpacker import wire
from rollpacker.observability import log_context
from rollpacker.observability.tracing import span
from rollpacker.policy.events import (
    Event,
    GroupInterrupted,
    ProgressReported,
    ReplicaDraining,
    ReplicaLost,
    ResponseFinished,
)
from rollpacker.rpc.client import stream
from rollpacker.rpc.errors import FailedPreconditionError, ServiceError, UnavailableError
from rollpacker.tasks import end_tasks
from rollpacker.types import DrawId, FinishReason, InvalidResponseError
from rollpacker.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from services.coordinator.carry_over import CarryOver
from services.coordinator.collected import CollectedResponse
from services.coordinator.replica_idle import ReplicaIdle
from services.coordinator.replicas import ReplicaSet
from services.coordinator.round_context import (
    RoundContext,
    check_response,
    group_request,
    stream_seconds,
)
from services.coordinator.round_result import RoundFailedError
from services.coordinator.round_tasks import RoundTasks

_MAX_FAILURES = 3  # of one draw, apart from replicas that go away
_MAX_LOSSES = 20  # of replicas that run one draw: it may be what kills them
_REPLICA_GONE = ("WEIGHT_VERSION_MISMATCH",)
_FINAL = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED")
_LAUNCHES_AT_ONCE = 64
_log = logging.getLogger(__name__)


class GroupStreams:
    """The streams of one round. Events and errors are told as they come."""

    def __init__(
        self,
        context: RoundContext,
        replicas: ReplicaSet,
        tasks: RoundTasks,
        tell: Callable[[Event | BaseException], None],
    ) -> None:
        self.collected: dict[tuple[DrawId, int], CollectedResponse] = {}
        self.carry_over = CarryOver(
            context.weight_version,
            context.drafts,
            context.carry_over_max_tokens,
            context.run_id,
            context.draws,
        )
        self.idle = ReplicaIdle()
        self._context = context
        self._replicas = replicas
        self._tasks = tasks
        self._tell = tell
        self._streams: dict[DrawId, tuple[str, asyncio.Task[None]]] = {}  # with the replica
        self._draining: set[str] = set()  # replicas that still stream
        self._failures: dict[DrawId, int] = {}
        self._losses: dict[DrawId, int] = {}

    async def launch(self, draw: DrawId, replica_id: str, indices: tuple[int, ...]) -> None:
        """Begin a group's stream."""
        task = self._tasks.spawn(self._generate(draw, replica_id, indices))
        self._streams[draw] = (replica_id, task)
        if len(self._streams) % _LAUNCHES_AT_ONCE == 0:
            await asyncio.sleep(0)  # these begin, and others have their turn

    def abort(self, draw: DrawId) -> None:
        """Nobody needs the group any more."""
        _, task = self._streams.pop(draw)
        task.cancel()

    async def end(self, draw: DrawId) -> bool:
        """End a group's stream; False if it has ended, and its last news is under way."""
        _, task = self._streams[draw]
        if task.done():
            return False
        await end_tasks(task)
        return True

    async def end_all_of(self, replica_id: str) -> None:
        """A lost replica's groups go on elsewhere; its streams must not speak for them any more.

        Raises RoundFailedError when one of them has lost too many replicas.
        """
        lost = {d: task for d, (name, task) in self._streams.items() if name == replica_id}
        for draw, task in lost.items():
            self._losses[draw] = self._losses.get(draw, 0) + (not task.done())
            if self._losses[draw] >= _MAX_LOSSES:
                raise RoundFailedError(
                    f"{_MAX_LOSSES} replicas were lost while they ran draw {draw}, the last one was"
                    f" {replica_id}; look at its log, and leave prompt {draw.prompt_id} out if it"
                    " is what kills them"
                )
        await end_tasks(*lost.values())

    def draining(self, replica_id: str) -> None:
        """The replica is about to end its streams with what they have."""
        self._draining.add(replica_id)

    def let_go_if_drained(self, replica_id: str) -> None:
        """A draining replica without streams is lost; if it is alive, it is brought up again."""
        if replica_id not in self._draining:
            return
        own = asyncio.current_task()
        tasks = [task for name, task in self._streams.values() if name == replica_id]
        if all(task.done() for task in tasks if task is not own):
            self._draining.discard(replica_id)
            if self._replicas.lost(replica_id):
                _log.info("replica %s has handed back its work", replica_id)
                self._tell(ReplicaLost(time.monotonic(), replica_id))

    async def _generate(self, draw: DrawId, replica_id: str, indices: tuple[int, ...]) -> None:
        missing = set(indices)
        log_context(prompt=draw.prompt_id, replica=replica_id)
        self.idle.group_started(replica_id, time.monotonic())
        try:
            with span("group", prompt=draw.prompt_id, replica=replica_id):
                messages = self._stream(draw, replica_id, indices)
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        self._take(draw, message, missing)
        except (ServiceError, InvalidResponseError, wire.WireError) as error:
            self._failed(draw, replica_id, error)
        else:
            if missing:  # a replica that ends a stream early takes no more work
                self._draining.add(replica_id)
                self._tell(ReplicaDraining(time.monotonic(), replica_id))
                self._tell(GroupInterrupted(time.monotonic(), draw, replica_id))
        finally:
            self.idle.group_ended(replica_id, time.monotonic())
            self.let_go_if_drained(replica_id)

    def _stream(
        self, draw: DrawId, replica_id: str, indices: tuple[int, ...]
    ) -> AsyncGenerator[rollout_service_pb2.GenerateGroupResponse, None]:
        parts = self.carry_over.launch(draw, indices)
        request = group_request(self._context, draw, indices, parts)
        seconds = stream_seconds(self._context, self._replicas.waves(replica_id, len(indices)))
        channel = self._replicas.channel(replica_id)
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        return stream(lambda: stub.GenerateGroup(request, timeout=seconds))

    def _take(
        self,
        draw: DrawId,
        message: rollout_service_pb2.GenerateGroupResponse,
        missing: set[int],
    ) -> None:
        if message.HasField("progress"):
            self._progressed(draw, message.progress)
            return
        response = wire.response_from_proto(message.finished.response)
        check_response(self._context, draw, response, missing)
        if response.finish_reason is FinishReason.INTERRUPTED:
            self.carry_over.interrupted(draw, response)
            return
        timing = wire.timing_from_proto(message.finished.timing)
        text = self._context.tokenizer.decode(response.token_ids)
        missing.discard(response.index)
        if (draw, response.index) in self.collected:
            return  # its news was still under way when the draw was launched again
        self.collected[draw, response.index] = CollectedResponse(response, timing, text)
        self.carry_over.finished(draw, response)
        tokens, carried = len(response.token_ids), response.carried_token_count
        self._tell(ResponseFinished(time.monotonic(), draw, response.index, tokens, carried))

    def _progressed(self, draw: DrawId, progress: rollout_service_pb2.GroupProgress) -> None:
        for new in progress.new_tokens:
            self.carry_over.progressed(draw, new.index, new.token_ids, new.logprobs)
        self._tell(
            ProgressReported(
                time.monotonic(),
                draw,
                progress.longest_response_tokens,
                progress.total_response_tokens,
                progress.carried_response_tokens,
            )
        )

    def _failed(self, draw: DrawId, replica_id: str, error: Exception) -> None:
        """What a broken stream means: the replica is gone, the run cannot go on, or once more."""
        is_gone = isinstance(error, UnavailableError) or (
            isinstance(error, FailedPreconditionError) and error.reason in _REPLICA_GONE
        )
        if is_gone:
            if self._replicas.lost(replica_id):
                _log.warning("replica %s is lost: %s", replica_id, error)
                self._tell(ReplicaLost(time.monotonic(), replica_id))
            return
        self._failures[draw] = self._failures.get(draw, 0) + 1
        if isinstance(error, ServiceError) and error.code.name in _FINAL:
            self._tell(error)
        elif self._failures[draw] >= _MAX_FAILURES:
            what = f"draw {draw} failed {_MAX_FAILURES} times, last on {replica_id}: {error}"
            remedy = "look at the log of that replica"
            if isinstance(error, InvalidResponseError):
                remedy += ", and at trainer/grad_norm: weights that have diverged answer like this"
            self._tell(RoundFailedError(f"{what}; {remedy}"))
        else:
            _log.warning("draw %s failed on %s and is repeated: %s", draw, replica_id, error)
            self._tell(GroupInterrupted(time.monotonic(), draw, replica_id))
