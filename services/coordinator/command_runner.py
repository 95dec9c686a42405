"""Carries out the commands of one round: streams, scores and the sample stream.

    replicas --ReplicaJoined/Lost--> +-------+ --LaunchGroup--> a stream per running group
    streams --Progress, Finished---> | Round | --ScoreResponse-> a call per finished response
    scores --ResponseScored--------> +-------+ --EmitGroup----> XADD, in order

All events pass one queue, and one loop handles them; everything else is a task that ends in an
event. A replica takes work only after ApplyEngineSpec returned for the round's weights. When a
stream breaks because the replica is away, the replica counts as lost and is brought up again.
What never happens: two streams of one draw at a time; an invalid response in a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker import wire
from rollpacker.data.tokenizer import TextTokenizer
from rollpacker.policy.commands import (
    AbortGroup,
    Command,
    EmitGroup,
    FinishRound,
    LaunchGroup,
    ScoreResponse,
)
from rollpacker.policy.events import (
    Event,
    GroupInterrupted,
    GroupRestored,
    ProgressReported,
    ReplicaLost,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.round import Round
from rollpacker.rpc.client import stream
from rollpacker.rpc.errors import FailedPreconditionError, ServiceError, UnavailableError
from rollpacker.types import (
    Draw,
    DrawId,
    FinishReason,
    InvalidResponseError,
    Prompt,
    PromptGroup,
    Response,
    ResponseTiming,
    SamplingParameters,
    ScoredResponse,
)
from rollpacker.v1 import rollout_service_pb2, rollout_service_pb2_grpc
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient, Score

_WAIT_LOG_SECONDS = 30.0
_REPORT_SECONDS = 0.25
_PROGRESS_INTERVAL_TOKENS = 16
_MAX_FAILURES = 3  # of one draw, apart from replicas that go away
_STREAM_SECONDS = 600.0  # of a group's stream, apart from its tokens
_SLOWEST_SECONDS_PER_TOKEN = 1.0
_REPLICA_GONE = ("WEIGHT_VERSION_MISMATCH",)
_log = logging.getLogger(__name__)


class RoundFailedError(Exception):
    """The round cannot be finished; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What a round needs to know beyond its policy."""

    run_id: str
    step: int
    fence: int
    weight_version: int
    sampling: SamplingParameters
    draws: Mapping[DrawId, Draw]
    prompts: Mapping[DrawId, Prompt]
    tokenizer: TextTokenizer


@dataclass(slots=True)
class _Collected:
    response: Response
    timing: ResponseTiming
    text: str
    score: Score | None = None


@dataclass(slots=True)
class RoundResult:
    """A finished round."""

    finish: FinishRound
    groups: list[PromptGroup] = field(default_factory=list)  # in the order of the stream
    apply_seconds: float = 0.0  # until the first replica served the weights


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
    ) -> None:
        self._round = round_
        self._context = context
        self._replicas = replicas
        self._rewards = rewards
        self._emit = emit
        self._on_progress = on_progress
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: dict[DrawId, tuple[str, asyncio.Task[None]]] = {}  # with the replica
        self._collected: dict[tuple[DrawId, int], _Collected] = {}
        self._failures: dict[DrawId, int] = {}
        self._groups: list[PromptGroup] = []
        self._reported_at = 0.0

    async def run(self, restored: Sequence[PromptGroup] = ()) -> RoundResult:
        """Run the round; `restored` groups stand in the sample stream already, in its order.

        Raises RoundFailedError, ServiceError (STALE_FENCE: stop).
        """
        try:
            for group in restored:
                tokens = tuple(len(s.response.token_ids) for s in group.responses)
                self._events.put_nowait(GroupRestored(time.monotonic(), group.draw.id, tokens))
            self._spawn(self._replicas.run(self._events.put_nowait))
            finish = await self._loop()
            return RoundResult(finish, [*restored, *self._groups])
        finally:
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(self) -> FinishRound:
        while True:
            event = await self._next_event()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, ReplicaLost):
                await self._stop_streams_of(event.replica_id)
            for command in self._round.handle(event):
                if isinstance(command, FinishRound):
                    return command
                await self._carry_out(command)
            self._report()

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
            case AbortGroup(draw):
                _, task = self._streams.pop(draw)
                task.cancel()
            case ScoreResponse(draw, index):
                self._spawn(self._score(draw, index))
            case EmitGroup():
                group = self._group(command)
                await self._emit(group)
                self._groups.append(group)

    async def _stop_streams_of(self, replica_id: str) -> None:
        """A lost replica's groups go on elsewhere; its streams must not speak for them any more."""
        stale = [task for name, task in self._streams.values() if name == replica_id]
        for task in stale:
            task.cancel()
        await asyncio.gather(*stale, return_exceptions=True)

    async def _generate(self, draw: DrawId, replica_id: str, indices: tuple[int, ...]) -> None:
        missing = set(indices)
        try:
            async with contextlib.aclosing(self._stream(draw, replica_id, indices)) as messages:
                async for message in messages:
                    self._take(draw, message, missing)
        except (ServiceError, InvalidResponseError, wire.WireError) as error:
            self._stream_failed(draw, replica_id, error)
            return
        if missing:
            self._events.put_nowait(GroupInterrupted(time.monotonic(), draw))

    def _stream(
        self, draw: DrawId, replica_id: str, indices: tuple[int, ...]
    ) -> AsyncGenerator[rollout_service_pb2.GenerateGroupResponse, None]:
        context = self._context
        request = rollout_service_pb2.GenerateGroupRequest(
            run_id=context.run_id,
            step=context.step,
            fence=context.fence,
            draw=wire.draw_to_proto(context.draws[draw]),
            prompt_token_ids=context.prompts[draw].token_ids,
            weight_version=context.weight_version,
            sampling=wire.sampling_to_proto(context.sampling),
            indices=indices,
            progress_interval_tokens=_PROGRESS_INTERVAL_TOKENS,
        )
        tokens = context.sampling.max_response_tokens
        seconds = _STREAM_SECONDS + tokens * _SLOWEST_SECONDS_PER_TOKEN
        channel = self._replicas.channel(replica_id)
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        return stream(lambda: stub.GenerateGroup(request, timeout=seconds))

    def _take(
        self,
        draw: DrawId,
        message: rollout_service_pb2.GenerateGroupResponse,
        missing: set[int],
    ) -> None:
        now = time.monotonic()
        if message.HasField("progress"):
            progress = message.progress
            self._events.put_nowait(
                ProgressReported(
                    now, draw, progress.longest_response_tokens, progress.total_response_tokens
                )
            )
            return
        response = wire.response_from_proto(message.finished.response)
        self._check(draw, response, missing)
        if response.finish_reason is FinishReason.INTERRUPTED:
            return
        timing = wire.timing_from_proto(message.finished.timing)
        text = self._context.tokenizer.decode(response.token_ids)
        missing.discard(response.index)
        self._collected[draw, response.index] = _Collected(response, timing, text)
        self._events.put_nowait(
            ResponseFinished(now, draw, response.index, len(response.token_ids))
        )

    def _check(self, draw: DrawId, response: Response, missing: set[int]) -> None:
        context = self._context
        seeds = context.draws[draw].seeds
        if response.index not in missing or response.seed != seeds[response.index]:
            raise InvalidResponseError(
                f"response {response.response_id}: index {response.index} with seed"
                f" {response.seed} was not asked for"
            )
        if response.weight_version != context.weight_version:
            raise InvalidResponseError(
                f"response {response.response_id}: weight version {response.weight_version},"
                f" asked for {context.weight_version}"
            )
        if len(response.token_ids) > context.sampling.max_response_tokens:
            raise InvalidResponseError(
                f"response {response.response_id}: {len(response.token_ids)} tokens, above the cap"
                f" of {context.sampling.max_response_tokens}"
            )

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
            self._events.put_nowait(GroupInterrupted(time.monotonic(), draw))

    async def _score(self, draw: DrawId, index: int) -> None:
        collected = self._collected[draw, index]
        prompt = self._context.prompts[draw]
        try:
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

    def _group(self, command: EmitGroup) -> PromptGroup:
        scored = [
            self._scored(self._collected[command.draw, index], advantage)
            for index, advantage in zip(command.indices, command.advantages, strict=True)
        ]
        return PromptGroup(
            run_id=self._context.run_id,
            step=self._context.step,
            draw=self._context.draws[command.draw],
            prompt_token_ids=self._context.prompts[command.draw].token_ids,
            responses=tuple(scored),
            weight_version=self._context.weight_version,
            race_key=max(len(item.response.token_ids) for item in scored),
        )

    def _scored(self, collected: _Collected, advantage: float) -> ScoredResponse:
        score = collected.score
        assert score is not None, "the round emits scored responses only"
        return ScoredResponse(
            response=collected.response,
            reward=score.reward,
            advantage=advantage,
            verdict=score.verdict,
            text=collected.text,
            timing=collected.timing,
            score_start_time=score.start_time,
            score_time=score.end_time,
        )

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
