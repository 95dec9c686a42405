"""Carries out the commands of one round, and tells it what comes of them.

    replicas --ReplicaJoined/Lost--> +-------+ --LaunchGroup--> a stream per running group
    streams --Progress, Finished---> | Round | --ScoreResponse-> its queue, then a call each
    scores --ResponseScored--------> +-------+ --EmitGroup----> XADD, in order
    data --DrawsAdded--------------> +-------+ --RequestDraws-> the next prompts

All events pass one queue, and one loop handles them; everything else is a task that ends in an
event (`group_streams`, `replicas`). A replica takes work only after ApplyEngineSpec returned for
the round's weights. Between two events the loop may also interrupt groups: for an idle replica that
takes one over, and on replicas that are released to training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

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
from rollpacker.policy.events import (
    DrawsAdded,
    Event,
    GroupInterrupted,
    GroupRestored,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ResponseScored,
)
from rollpacker.policy.reward_meter import RewardsSeen
from rollpacker.policy.round import Round
from rollpacker.policy.scale_down import ScaleDown
from rollpacker.rpc.errors import ServiceError
from rollpacker.types import Draft, Draw, DrawId, GraderKind, PromptGroup
from services.coordinator.collected import prompt_group
from services.coordinator.group_streams import GroupStreams
from services.coordinator.replicas import ReplicaSet
from services.coordinator.reward_client import RewardClient
from services.coordinator.reward_queues import RewardQueues
from services.coordinator.round_context import RoundContext
from services.coordinator.round_result import RoundFailedError, RoundResult
from services.coordinator.round_tasks import RoundTasks

_WAIT_LOG_SECONDS = 30.0
_REPORT_SECONDS = 0.25
_log = logging.getLogger(__name__)


Observer = Callable[[Event, Sequence[Command]], None]


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
        rebalances: bool = False,
    ) -> None:
        """`scale_down`: what may release replicas while the last responses run. `observers` are
        told every event and what the round answered. `take_draws`: the next draws of the data,
        which `context` knows from then on; for dynamic sampling. `rebalances`: idle replicas take
        groups over."""
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
        self._reward_queues = RewardQueues(round_.responses_per_prompt, round_.has_lost)
        self._emit = emit
        self._on_progress = on_progress
        self._take_draws = take_draws
        self._restored: dict[DrawId, GroupRestored] = {}  # of draws that are not added yet
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._tell = self._events.put_nowait  # no method of ours: whoever keeps it keeps no round
        self._tasks = RoundTasks(self._tell)
        self._streams = GroupStreams(context, replicas, self._tasks, self._tell)
        self._groups: list[PromptGroup] = []
        self._reported_at = 0.0
        self._first_at: float | None = None  # of its events, monotonic
        self._last_at = 0.0

    async def run(self, restored: Sequence[PromptGroup] = ()) -> RoundResult:
        """Run the round; `restored` groups stand in the sample stream already, in its order.

        Raises RoundFailedError, ServiceError (STALE_FENCE: stop).
        """
        log_context(run=self._context.run_id, step=self._context.step)
        try:
            for group in restored:
                event = _group_restored(group)
                if event.draw in self._context.draws:
                    self._tell(event)
                else:
                    self._restored[event.draw] = event
            with span("round", run=self._context.run_id, step=self._context.step):
                self._tasks.spawn(self._replicas.run(self._tell))
                finish = await self._loop()
            now = time.monotonic()
            return RoundResult(
                finish,
                [*restored, *self._groups],
                reward_wait_seconds=self._reward_wait_seconds(finish),
                idle_share=self._streams.idle.share(now),
                drafts=self._drafts_left(finish),
                checked_drafts=tuple(self._streams.carry_over.checked),
                flat_draws=tuple(self._context.draws[draw] for draw in finish.flat),
                released=tuple(now - at for at in self._released.values()),
                preemptions=await self._replicas.preemptions(),
                moved_groups=self._moved_groups,
                rewards=self._rewards_seen(),
            )
        finally:
            await self._tasks.end()

    async def _loop(self) -> FinishRound:
        while True:
            event = await self._next_event()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, ReplicaJoined):
                self._streams.idle.joined(event.replica_id, event.at)
            if isinstance(event, ReplicaLost):
                await self._streams.end_all_of(event.replica_id)
                self._streams.idle.lost(event.replica_id, event.at)
            if finish := await self._handle(event):
                return finish
            if self._rebalances:
                await self._rebalance()
            await self._release_replicas()
            self._report()

    async def _handle(self, event: Event) -> FinishRound | None:
        if self._first_at is None:
            self._first_at = event.at
        self._last_at = event.at
        commands = self._round.handle(event)
        for observe in self._observers:
            observe(event, commands)
        for command in commands:
            if isinstance(command, FinishRound):
                return command
            await self._carry_out(command)
        now = time.monotonic()  # an event may be handled late
        for due in self._reward_queues.due(now, self._rewards):
            self._tasks.spawn(self._score(due.draw, due.index))
        return None

    async def _rebalance(self) -> None:
        """Idle replicas take over groups, with the tokens that these have so far."""
        while (found := self._round.group_to_move()) is not None:
            draw, replica_id = found
            if not await self._streams.end(draw):  # its last news has not been handled yet
                return
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
            self._streams.draining(name)
            await self._handle(ReplicaDraining(time.monotonic(), name))
            self._tasks.spawn(self._release(name))

    async def _release(self, replica_id: str) -> None:
        """Its streams end with what they have, and go on elsewhere."""
        try:
            await self._replicas.release(replica_id, self._tell)
        except ServiceError as error:
            _log.warning("replica %s was not released: %s", replica_id, error)
        self._streams.let_go_if_drained(replica_id)

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
                await self._streams.launch(draw, replica_id, indices)
            case AbortGroup(draw):
                self._streams.abort(draw)
                self._reward_queues.let_go(self._grader_kind(draw), draw)
            case ScoreResponse(draw):
                self._reward_queues.put(self._grader_kind(draw), command)
            case RequestDraws(count):
                self._add_draws(count)
            case EmitGroup():
                group = prompt_group(self._context, command, self._streams.collected)
                await self._emit(group)
                self._groups.append(group)

    def _grader_kind(self, draw: DrawId) -> GraderKind:
        return self._context.prompts[draw].grader_kind

    def _add_draws(self, count: int) -> None:
        draws = self._take_draws(count) if self._take_draws else []
        for draw in draws:
            self._prompt_tokens[draw.id] = len(self._context.prompts[draw.id].token_ids)
        known = [self._restored.pop(draw.id) for draw in draws if draw.id in self._restored]
        self._tell(DrawsAdded(time.monotonic(), count, tuple(draws), tuple(known)))

    def _reward_wait_seconds(self, finish: FinishRound) -> float:
        assert self._first_at is not None
        return max(0.0, self._last_at - self._first_at - finish.rollout_seconds)

    def _rewards_seen(self) -> RewardsSeen:
        kinds = {draw: prompt.grader_kind.value for draw, prompt in self._context.prompts.items()}
        return RewardsSeen(kinds, self._reward_queues.speeds)

    def _drafts_left(self, finish: FinishRound) -> dict[DrawId, tuple[Draft, ...]]:
        return {
            item.draw.id: self._streams.carry_over.left(
                item.draw.id, range(len(item.response_tokens))
            )
            for item in finish.deferred
        }

    async def _score(self, draw: DrawId, index: int) -> None:
        collected = self._streams.collected[draw, index]
        prompt = self._context.prompts[draw]
        log_context(prompt=draw.prompt_id)
        try:
            with span("score", response=collected.response.response_id):
                score = await self._rewards.score(
                    collected.response.response_id, collected.text, prompt
                )
        except ServiceError as error:
            self._tell(RoundFailedError(f"prompt {prompt.prompt_id} cannot be scored: {error}"))
            return
        collected.score = score
        seconds = None if score.reward is None else score.work_seconds
        self._reward_queues.answered(prompt.grader_kind, seconds)
        self._tell(ResponseScored(time.monotonic(), draw, index, score.reward))


def _group_restored(group: PromptGroup) -> GroupRestored:
    tokens = tuple(len(scored.response.token_ids) for scored in group.responses)
    carried = sum(scored.response.carried_token_count for scored in group.responses)
    return GroupRestored(time.monotonic(), group.draw.id, tokens, carried)
