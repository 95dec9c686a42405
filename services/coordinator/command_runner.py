"""Carries out the commands of one round: streams, scores and the sample stream.

    replicas --ReplicaJoined/Lost--> +-------+ --LaunchGroup--> a stream per running group
    streams --Progress, Finished---> | Round | --ScoreResponse-> a call per finished response
    scores --ResponseScored--------> +-------+ --EmitGroup----> XADD, in order
    data --DrawsAdded--------------> +-------+ --RequestDraws-> the next prompts

All events pass one queue, and one loop handles them; everything else is a task that ends in an
event. A replica takes work only after ApplyEngineSpec returned for the round's weights. When a
stream breaks because the replica is away, the replica counts as lost and is brought up again; a
replica that ends its streams early is draining: what it hands back goes on elsewhere
(`carry_over`).
What never happens: two streams of one draw at a time; an invalid response in a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollpacker import wire
from rollpacker.observability import log_context
from rollpacker.observability.tracing import span
from rollpacker.policy.commands import (
    AbortGroup,
    Command,
    EmitGroup,
    FinishRound,
    LaunchGroup,
    RequestDraws,
    ScoreResponse,
)
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.events import (
    DrawsAdded,
    Event,
    GroupInterrupted,
    GroupRestored,
    ProgressReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.round import Round
from rollpacker.policy.scale_down import ScaleDown
from rollpacker.rpc.client import stream
from rollpacker.rpc.errors import FailedPreconditionError, ServiceError, UnavailableError
from rollpacker.tasks import end_tasks
from rollpacker.types import (
    Draft,
    Draw,
    DrawId,
    FinishReason,
    InvalidResponseError,
    PromptGroup,
)
from rollpacker.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from services.coordinator.carry_over import CarryOver, CheckedDraft
from services.coordinator.collected import CollectedResponse, prompt_group
from services.coordinator.replica_idle import ReplicaIdle
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_context import (
    RoundContext,
    check_response,
    group_request,
    stream_seconds,
)

_WAIT_LOG_SECONDS = 30.0
_REPORT_SECONDS = 0.25
_LAUNCHES_AT_ONCE = 64
_MAX_FAILURES = 3  # of one draw, apart from replicas that go away
_MAX_LOSSES = 20  # of replicas that run one draw: it may be what kills them
_REPLICA_GONE = ("WEIGHT_VERSION_MISMATCH",)
_log = logging.getLogger(__name__)


Observer = Callable[[Event, Sequence[Command]], None]


class RoundFailedError(Exception):
    """The round cannot be finished; the message says why and what to do."""


@dataclass(slots=True)
class RoundResult:
    """A finished round."""

    finish: FinishRound
    groups: list[PromptGroup] = field(default_factory=list)  # in the order of the stream
    apply_seconds: float = 0.0  # until the first replica served the weights
    idle_share: float = 0.0  # of the replicas' time, without a group
    drafts: dict[DrawId, tuple[Draft, ...]] = field(default_factory=dict)  # of the deferred draws
    checked_drafts: tuple[CheckedDraft, ...] = ()
    flat_draws: tuple[Draw, ...] = ()  # dropped by dynamic sampling
    tensor_parallel_size: int = 0  # that was asked for; 0: none
    preemptions: int = 0  # of the replicas that served to the end
    released: tuple[float, ...] = ()  # for each released replica, seconds until the end
    moved_groups: int = 0  # that an idle replica took over
    meter: EngineMeter | None = None  # of the engines' speed, where mode auto plans with it


class CommandRunner:
    """Runs one round to its end."""

    def __init__(
        self,
        round_: Round,
        context: RoundContext,
        replicas: ReplicaSet,
        rewards: RewardClient,
        emit: Callable[[PromptGroup], Awaitable[None]],
        on_progress: Callable[[Round], None],
        scale_down: ScaleDown | None = None,
        observers: Sequence[Observer] = (),
        take_draws: Callable[[int], list[Draw]] | None = None,
        *,
        rebalances: bool | None = False,
    ) -> None:
        """`scale_down`: what may release replicas while the last responses run. `observers` are
        told every event and what the round answered. `take_draws`: the next draws of the data,
        which `context` knows from then on; for dynamic sampling. `rebalances`: idle replicas take
        groups over; None: where all replicas take drafts."""
        self._rebalances = rebalances
        self._moved_groups = 0
        self._scale_down = scale_down
        self._released: dict[str, float] = {}  # when, monotonic
        self._prompt_tokens = {d: len(p.token_ids) for d, p in context.prompts.items()}
        self._round = round_
        self._observers = observers
        self._context = context
        self._replicas = replicas
        self._rewards = rewards
        self._emit = emit
        self._on_progress = on_progress
        self._take_draws = take_draws
        self._restored: dict[DrawId, GroupRestored] = {}  # of draws that are not added yet
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[DrawId, tuple[str, asyncio.Task[None]]] = {}  # with the replica
        self._collected: dict[tuple[DrawId, int], CollectedResponse] = {}
        self._draining: set[str] = set()  # replicas that still stream
        self._failures: dict[DrawId, int] = {}
        self._losses: dict[DrawId, int] = {}
        self._groups: list[PromptGroup] = []
        self._reported_at = 0.0
        self._idle = ReplicaIdle()
        self._carry_over = CarryOver(
            context.weight_version, context.drafts, context.carry_over_max_tokens
        )

    async def run(self, restored: Sequence[PromptGroup] = ()) -> RoundResult:
        """Run the round; `restored` groups stand in the sample stream already, in its order.

        Raises RoundFailedError, ServiceError (STALE_FENCE: stop).
        """
        log_context(run=self._context.run_id, step=self._context.step)
        try:
            for group in restored:
                event = _group_restored(group)
                if event.draw in self._context.draws:
                    self._events.put_nowait(event)
                else:
                    self._restored[event.draw] = event
            with span("round", run=self._context.run_id, step=self._context.step):
                self._spawn(self._replicas.run(self._events.put_nowait))
                finish = await self._loop()
            now = time.monotonic()
            return RoundResult(
                finish,
                [*restored, *self._groups],
                idle_share=self._idle.share(now),
                drafts=self._drafts_left(finish),
                checked_drafts=tuple(self._carry_over.checked),
                flat_draws=tuple(self._context.draws[draw] for draw in finish.flat),
                released=tuple(now - at for at in self._released.values()),
                preemptions=await self._replicas.preemptions(),
                moved_groups=self._moved_groups,
            )
        finally:
            await end_tasks(*self._tasks)

    async def _loop(self) -> FinishRound:
        while True:
            event = await self._next_event()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, ReplicaJoined):
                self._idle.joined(event.replica_id, event.at)
            if isinstance(event, ReplicaLost):
                await self._stop_streams_of(event.replica_id)
                self._idle.lost(event.replica_id, event.at)
            if finish := await self._handle(event):
                return finish
            if self._replicas.take_drafts if self._rebalances is None else self._rebalances:
                await self._rebalance()
            await self._release_replicas()
            self._report()

    async def _handle(self, event: Event) -> FinishRound | None:
        commands = self._round.handle(event)
        for observe in self._observers:
            observe(event, commands)
        for command in commands:
            if isinstance(command, FinishRound):
                return command
            await self._carry_out(command)
        return None

    async def _rebalance(self) -> None:
        """Idle replicas take over groups; what these have so far are drafts of the same weights."""
        while (found := self._round.group_to_move()) is not None:
            draw, replica_id = found
            _, task = self._streams[draw]
            if task.done():  # its last news has not been handled yet
                return
            await end_tasks(task)
            self._moved_groups += 1
            await self._handle(GroupInterrupted(time.monotonic(), draw, replica_id))

    async def _release_replicas(self) -> None:
        if self._scale_down is None:
            return
        loads = partial(self._round.replica_loads, self._prompt_tokens)
        share, idle = self._round.finished_share, self._round.idle_replicas()
        for name in self._scale_down.look(share, idle, loads):
            _log.info("releasing replica %s with %.0f %% of the round done", name, 100 * share)
            self._released[name] = time.monotonic()
            self._draining.add(name)
            await self._handle(ReplicaDraining(time.monotonic(), name))
            self._spawn(self._release(name))

    async def _release(self, replica_id: str) -> None:
        """Its streams end with what they have, and go on elsewhere."""
        try:
            await self._replicas.release(replica_id, self._events.put_nowait)
        except ServiceError as error:
            _log.warning("replica %s was not released: %s", replica_id, error)
        self._let_go_if_drained(replica_id)

    def _report(self) -> None:
        """Tell watchers, not more often than they can see."""
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            self._on_progress(self._round)

    async def _next_event(self) -> Event | BaseException:
        while True:
            try:
                async with asyncio.timeout(_WAIT_LOG_SECONDS):
                    return await self._events.get()
            except TimeoutError:
                open_groups = self._round.outstanding()
                names = ", ".join(f"{d} {s.value}" for d, s in list(open_groups.items())[:5])
                _log.warning(
                    "step %d waits for %d groups (%s ...); replicas that serve: %s",
                    self._context.step,
                    len(open_groups),
                    names,
                    ", ".join(self._replicas.serving()) or "none",
                )

    async def _carry_out(self, command: Command) -> None:
        match command:
            case LaunchGroup(draw, replica_id, indices):
                task = self._spawn(self._generate(draw, replica_id, indices))
                self._streams[draw] = (replica_id, task)
                if len(self._streams) % _LAUNCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # these begin, and others have their turn
            case AbortGroup(draw):
                _, task = self._streams.pop(draw)
                task.cancel()
            case ScoreResponse(draw, index):
                self._spawn(self._score(draw, index))
            case RequestDraws(count):
                self._add_draws(count)
            case EmitGroup():
                group = prompt_group(self._context, command, self._collected)
                await self._emit(group)
                self._groups.append(group)

    def _add_draws(self, count: int) -> None:
        draws = self._take_draws(count) if self._take_draws else []
        for draw in draws:
            self._prompt_tokens[draw.id] = len(self._context.prompts[draw.id].token_ids)
        known = [self._restored.pop(draw.id) for draw in draws if draw.id in self._restored]
        self._events.put_nowait(DrawsAdded(time.monotonic(), count, tuple(draws), tuple(known)))

    async def _stop_streams_of(self, replica_id: str) -> None:
        """A lost replica's groups go on elsewhere; its streams must not speak for them any more."""
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

    async def _generate(self, draw: DrawId, replica_id: str, indices: tuple[int, ...]) -> None:
        missing = set(indices)
        log_context(prompt=draw.prompt_id, replica=replica_id)
        self._idle.group_started(replica_id, time.monotonic())
        try:
            with span("group", prompt=draw.prompt_id, replica=replica_id):
                messages = self._stream(draw, replica_id, indices)
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        self._take(draw, message, missing)
        except (ServiceError, InvalidResponseError, wire.WireError) as error:
            self._stream_failed(draw, replica_id, error)
        else:
            if missing:  # a replica that ends a stream early takes no more work
                self._draining.add(replica_id)
                self._events.put_nowait(ReplicaDraining(time.monotonic(), replica_id))
                self._events.put_nowait(GroupInterrupted(time.monotonic(), draw, replica_id))
        finally:
            self._idle.group_ended(replica_id, time.monotonic())
            self._let_go_if_drained(replica_id)

    def _let_go_if_drained(self, replica_id: str) -> None:
        """A draining replica without streams is lost; if it is alive, it is brought up again."""
        if replica_id not in self._draining:
            return
        own = asyncio.current_task()
        tasks = [task for name, task in self._streams.values() if name == replica_id]
        if all(task.done() for task in tasks if task is not own):
            self._draining.discard(replica_id)
            if self._replicas.lost(replica_id):
                _log.info("replica %s has handed back its work", replica_id)
                self._events.put_nowait(ReplicaLost(time.monotonic(), replica_id))

    def _stream(
        self, draw: DrawId, replica_id: str, indices: tuple[int, ...]
    ) -> AsyncGenerator[rollout_service_pb2.GenerateGroupResponse, None]:
        parts = self._carry_over.launch(draw, indices)
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
            self._carry_over.interrupted(draw, response)
            return
        timing = wire.timing_from_proto(message.finished.timing)
        text = self._context.tokenizer.decode(response.token_ids)
        missing.discard(response.index)
        if (draw, response.index) in self._collected:
            return  # its news was still under way when the draw was launched again
        self._collected[draw, response.index] = CollectedResponse(response, timing, text)
        self._carry_over.finished(draw, response)
        tokens, carried = len(response.token_ids), response.carried_token_count
        self._events.put_nowait(
            ResponseFinished(time.monotonic(), draw, response.index, tokens, carried)
        )

    def _progressed(self, draw: DrawId, progress: rollout_service_pb2.GroupProgress) -> None:
        for new in progress.new_tokens:
            self._carry_over.progressed(draw, new.index, new.token_ids)
        self._events.put_nowait(
            ProgressReported(
                time.monotonic(),
                draw,
                progress.longest_response_tokens,
                progress.total_response_tokens,
                progress.carried_response_tokens,
            )
        )

    def _drafts_left(self, finish: FinishRound) -> dict[DrawId, tuple[Draft, ...]]:
        return {
            item.draw.id: self._carry_over.left(item.draw.id, range(len(item.response_tokens)))
            for item in finish.deferred
        }

    def _stream_failed(self, draw: DrawId, replica_id: str, error: Exception) -> None:
        gone = isinstance(error, UnavailableError) or (
            isinstance(error, FailedPreconditionError) and error.reason in _REPLICA_GONE
        )
        if gone:
            if self._replicas.lost(replica_id):
                _log.warning("replica %s is lost: %s", replica_id, error)
                self._events.put_nowait(ReplicaLost(time.monotonic(), replica_id))
            return
        self._failures[draw] = self._failures.get(draw, 0) + 1
        final = isinstance(error, ServiceError) and error.code.name in (
            "INVALID_ARGUMENT",
            "FAILED_PRECONDITION",
            "PERMISSION_DENIED",
        )
        if final:
            self._events.put_nowait(error)
        elif self._failures[draw] >= _MAX_FAILURES:
            self._events.put_nowait(
                RoundFailedError(
                    f"draw {draw} failed {_MAX_FAILURES} times, last on {replica_id}: {error};"
                    " look at the log of that replica"
                )
            )
        else:
            _log.warning("draw %s failed on %s and is repeated: %s", draw, replica_id, error)
            self._events.put_nowait(GroupInterrupted(time.monotonic(), draw, replica_id))

    async def _score(self, draw: DrawId, index: int) -> None:
        collected = self._collected[draw, index]
        prompt = self._context.prompts[draw]
        log_context(prompt=draw.prompt_id)
        try:
            with span("score", response=collected.response.response_id):
                score = await self._rewards.score(
                    collected.response.response_id, collected.text, prompt
                )
        except ServiceError as error:
            self._events.put_nowait(
                RoundFailedError(f"prompt {prompt.prompt_id} cannot be scored: {error}")
            )
            return
        collected.score = score
        self._events.put_nowait(ResponseScored(time.monotonic(), draw, index, score.reward))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unforeseen failure ends the round instead of leaving it waiting."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(error)


def _group_restored(group: PromptGroup) -> GroupRestored:
    tokens = tuple(len(scored.response.token_ids) for scored in group.responses)
    carried = sum(scored.response.carried_token_count for scored in group.responses)
    return GroupRestored(time.monotonic(), group.draw.id, tokens, carried)
