"""One round: a `Round` and the models, joined by one queue of timed events.

    replicas --Reached--> ResponseFinished, ProgressReported --+
    reward model ------> ResponseScored ----------------------+--> Round.handle --> commands
    replicas <---- LaunchGroup, AbortGroup;  reward <---- ScoreResponse;  trainer <---- EmitGroup

Progress is told when it can decide something, never token by token: a race in tokens can only turn
once the P0-th key stands, so from then on the replicas watch for responses of so many tokens, and
their groups are reported. Before groups are let go, their tokens are reported, so that what the
round counts as generated is what the replicas decoded. While released GPUs train, all that runs is
reported as groups complete: in a race in tokens, a complete one waits for those before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.policy.commands import (
    AbortGroup,
    Command,
    EmitGroup,
    FinishRound,
    LaunchGroup,
)
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.events import (
    Event,
    GroupInterrupted,
    ProgressReported,
    ReplicaDraining,
    ReplicaJoined,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.reward_meter import RewardsSeen
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, TailBatchingRules
from rollpacker.simulation.engine_model import Reached, ReplicaModel, RunningResponse
from rollpacker.simulation.reward_model import RewardModel
from rollpacker.simulation.round_trace import Launchable, RoundTrace
from rollpacker.simulation.schedule import PLAIN, Schedule
from rollpacker.simulation.scoring import Scoring
from rollpacker.types import Draw, DrawId

_SAME_TIME_DIGITS = 6  # of seconds: what happens within a microsecond is simultaneous


class SimulationError(RuntimeError):
    """The models and the round wait for each other: a bug of one of them."""


class GroupSink(Protocol):
    """Who takes the groups of a round and the GPUs that it lets go: a model of the trainer."""

    def receive(self, at: float, tokens: int) -> None:
        """A group has arrived."""

    def release(self, at: float, share: float) -> None:
        """From now on this share of the GPUs trains."""


ReleaseRule = Callable[["RoundSimulation"], Sequence[str]]  # the replicas to release now


@dataclass(slots=True)
class _Launch:
    """The newest launch of a group."""

    number: int  # of the launches of the round
    replica_id: str  # as the round said
    carried_tokens: int  # that it was given
    finished_tokens: int = 0  # of its responses


class RoundSimulation:
    """See the top of the file. Use once."""

    def __init__(
        self,
        round_: Round,
        rules: TailBatchingRules,
        planned: RoundPlan,
        draws: Sequence[Draw],
        launchables: Mapping[DrawId, Launchable],
        replicas: Sequence[ReplicaModel],
        reward: RewardModel | None,
        trainer: GroupSink,
        start: float,
        response_capacity: int,
        release_rule: ReleaseRule | None = None,
        schedule: Schedule = PLAIN,
        meter: EngineMeter | None = None,
    ) -> None:
        """`meter`: is told what the round is told, and stands in the trace."""
        self.round = round_
        self.rules = rules
        self.plan = planned
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self.trace = RoundTrace(start, meter=meter)
        self.now = start
        self.finished_responses = 0
        self.launched_responses = len(draws) * planned.response_count
        self._launchables = launchables
        self._attempts = {  # tokens of those still to come before the last one, by response
            (draw, index): list(tokens)
            for draw, known in launchables.items()
            for index, tokens in known.attempts.items()
        }
        self._scoring = Scoring.of_round(
            reward, launchables, rules, complete_first=schedule.complete_first
        )
        self._trainer = trainer
        self._capacity = response_capacity
        self._release_rule = release_rule
        self._finished: dict[DrawId, dict[int, int]] = {}
        self._schedule = schedule
        self._replica_count = len(replicas)  # released ones included
        self._releases = 0
        self._where: dict[DrawId, tuple[str, ...]] = {}  # running groups -> their replicas
        self._moved: dict[DrawId, list[RunningResponse]] = {}  # off a released replica
        self._launches: dict[DrawId, _Launch] = {}
        self._launch_count = 0
        self._complete = 0
        self._threshold: int | None = None  # tokens that the replicas watch for
        # (when, its turn at that time, when exactly, what): replicas in their order, then scores.
        self._queue: list[tuple[float, int, float, tuple[str, int] | ResponseScored]] = []
        self._places = {name: place for place, name in enumerate(self.replicas)}
        self._scores = 0
        self._versions = dict.fromkeys(self.replicas, 0)
        self._dirty: set[str] = set()
        self._turn = 0  # of the next response, where groups are spread

    def run(self) -> RoundTrace:
        """To the end of the round. Raises SimulationError if nothing can happen any more."""
        self._join()
        self._plan_events()
        while not self.round.over:
            if not self._queue:
                raise SimulationError(f"the round hangs: {self.round.outstanding()}")
            _, _, at, item = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            if isinstance(item, ResponseScored):
                self._scoring.answered(item)
                self._tell(item)
            else:
                name, version = item
                if self._versions.get(name) != version:
                    continue
                self._replica_event(name)
            self._plan_events()
        return self.trace

    def _join(self) -> None:
        """One group each, then the rest to the roomiest: all replicas are there from the start."""
        if self._schedule.predictor is not None:  # it is asked before anything is launched
            *others, last = self.replicas
            for name in others:
                self._tell(ReplicaJoined(self.now, name, self._capacity, others_follow=True))
            self._tell(ReplicaJoined(self.now, last, self._capacity))
            return
        for capacity in (0, self._capacity):
            for name in self.replicas:
                self._tell(ReplicaJoined(self.now, name, capacity))

    # --- replicas ---------------------------------------------------------------------------

    def _replica_event(self, name: str) -> None:
        replica = self.replicas[name]
        self._dirty.add(name)
        before = self._releases, self._complete
        for reached in replica.run_to_event():
            response = reached.response
            if name not in self._where.get(response.draw, ()):
                continue  # let go by an earlier one of the same step
            if not reached.finished:
                self._report(response.draw)
            elif not self._drawn_again(name, response):
                self._response_finished(reached)
        if self._schedule.rebalances:
            self._rebalance()
        self._release()
        if self._releases and (self._releases, self._complete) != before:
            self._report_for_order()

    def _drawn_again(self, name: str, response: RunningResponse) -> bool:
        """Sample it anew on its replica, if this was not its last attempt."""
        if not (left := self._attempts.get((response.draw, response.index))):
            return False
        left.pop(0)
        again = self._running(response.draw, response.index, 0)
        self.replicas[name].launch(self.now, [again])
        return True

    def _response_finished(self, reached: Reached) -> None:
        response = reached.response
        draw = response.draw
        finished = self._finished.setdefault(draw, {})
        completes = len(finished) + 1 == self.rules.responses_per_prompt
        if completes:
            self._before_completion(draw, reached.tokens)
        elif self._threshold is not None and reached.tokens >= self._threshold:
            self._report(draw, just_finished=reached.tokens)
            if draw not in self._where:
                return
        finished[response.index] = reached.tokens
        self.finished_responses += 1
        self._launches[draw].finished_tokens += reached.tokens
        carried = self.trace.carried_tokens
        carried[draw] = carried.get(draw, 0) + response.carried
        if completes:
            self._complete += 1
            if self.plan.response_count == len(finished):
                del self._where[draw]
        self._tell(
            ResponseFinished(self.now, draw, response.index, reached.tokens, response.carried)
        )
        if completes and self._complete >= self.plan.keep:
            self._watch_running()

    def _before_completion(self, draw: DrawId, tokens: int) -> None:
        """Tell the tokens of all that this completion may let go."""
        if self._threshold is not None:
            key = max([tokens, *self._finished[draw].values()])
            leaving = self.round.would_lose(draw, key)
        else:
            fills = self._complete + 1 >= self.plan.keep
            leaving = [other for other in self._where if other != draw] if fills else []
        for other in leaving:
            if other in self._where:
                self._report(other)
        if self.plan.response_count > self.rules.responses_per_prompt:
            self._report(draw, just_finished=tokens)

    def _watch_running(self) -> None:
        """The P0-th key stands or has come down: who is beyond it loses, the rest is watched."""
        threshold = self.round.deciding_tokens
        if threshold is None or threshold == self._threshold:
            return
        self._threshold = threshold
        beyond = set()
        for name, replica in self.replicas.items():
            replica.advance(self.now)
            beyond |= {reached.response.draw for reached in replica.watch(threshold)}
            self._dirty.add(name)
        for draw in sorted(beyond, key=lambda draw: self._launches[draw].number):
            if draw in self._where:  # a report before may have cost it the race
                self._report(draw)

    def _running_tokens(self, draw: DrawId) -> list[int]:
        """Of each unfinished response of a group."""
        tokens = []
        for name in self._where[draw]:
            replica = self.replicas[name]
            replica.advance(self.now)
            tokens += [replica.tokens_of(r) for r in replica.groups.get(draw, {}).values()]
        return tokens

    def _longest(self, draw: DrawId) -> int:
        return max([*self._running_tokens(draw), *self._finished.get(draw, {}).values()], default=0)

    def _report(self, draw: DrawId, just_finished: int = 0) -> None:
        longest = max(self._longest(draw), just_finished)
        running = sum(self._running_tokens(draw))
        launch = self._launches[draw]
        total = running + just_finished + launch.finished_tokens
        self._tell(ProgressReported(self.now, draw, longest, total, launch.carried_tokens))

    def _report_for_order(self) -> None:
        if self.rules.race is not RaceKind.TOKENS:
            return
        for draw in list(self._where):
            if draw in self._where:  # a report before may have cost it the race
                self._report(draw)

    def _plan_events(self) -> None:
        """Put the next event of each replica that changed into the queue."""
        for name in self._dirty:
            if name not in self.replicas:
                continue
            self._versions[name] += 1
            at = self.replicas[name].next_event_at()
            if at != float("inf"):
                self._push(at, self._places[name], (name, self._versions[name]))
        self._dirty.clear()

    def _push_score(self, item: ResponseScored) -> None:
        self._scores += 1
        self._push(item.at, len(self._places) + self._scores, item)

    def _push(self, at: float, turn: int, item: tuple[str, int] | ResponseScored) -> None:
        heapq.heappush(self._queue, (round(at, _SAME_TIME_DIGITS), turn, at, item))

    def _release(self) -> None:
        """Hand replicas over to training; their groups move and keep their tokens."""
        if self._release_rule is None or self.round.over:
            return
        names = self._release_rule(self)
        if not names:
            return
        self._releases += 1
        if self._releases == self._schedule.releases:
            self._release_rule = None
        total = self._replica_count
        for name in names:
            del self._versions[name]
            self._tell(ReplicaDraining(self.now, name))
        kept = [name for name in self.replicas if name not in names]
        for name in kept:  # the work is the same, so is the room
            self._tell(ReplicaJoined(self.now, name, self._capacity * total // len(kept)))
        leaving = set(names)
        self._move([draw for draw, at in self._where.items() if leaving.intersection(at)], leaving)
        self._trainer.release(self.now, 1.0 - len(self.replicas) / total)

    def _rebalance(self) -> None:
        """Idle replicas take over groups from busy ones."""
        while (found := self.round.group_to_move()) is not None:
            self._move([found[0]])

    def _move(self, draws: list[DrawId], leaving: Collection[str] = ()) -> None:
        """Take groups off all their replicas, then place them anew; some replicas leave."""
        for draw in draws:
            if draw in self._where:  # a report before may have cost it the race
                self._report(draw)
        draws = [draw for draw in draws if draw in self._where]
        for draw in draws:
            places = self._where.pop(draw)
            self._moved[draw] = [
                response
                for name in places
                for response in self.replicas[name].abort(self.now, draw)
            ]
            self._dirty.update(places)
        for name in leaving:
            del self.replicas[name]
        for draw in draws:
            self._tell(GroupInterrupted(self.now, draw, self._launches[draw].replica_id))

    # --- commands ---------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        commands = self.round.handle(event)
        if self.trace.meter is not None:
            self.trace.meter.handled(event, commands)
        self.trace.commands += len(commands)
        for command in commands:
            self._carry_out(command)
        for scored in self._scoring.handled(self.now, commands, self.round.has_lost):
            self._push_score(scored)

    def _carry_out(self, command: Command) -> None:
        match command:
            case LaunchGroup():
                self._launch(command)
            case AbortGroup(draw):
                self._abort(draw)
            case EmitGroup(draw, indices, _):
                lengths = tuple(self._finished[draw][index] for index in indices)
                self.trace.emitted.append((draw, lengths))
                self.trace.trained_tokens += sum(lengths)
                self._trainer.receive(self.now, sum(lengths))
            case FinishRound():
                self.trace.finish = command
                self.trace.end = self.now
                kinds = {draw: known.task for draw, known in self._launchables.items()}
                self.trace.rewards = RewardsSeen(kinds, self._scoring.meter.speeds)

    def _launch(self, command: LaunchGroup) -> None:
        draw = command.draw
        known = self._launchables[draw]
        moved = {response.index: response.tokens for response in self._moved.pop(draw, ())}
        responses = []
        for index in command.indices:
            draft = known.carried[index] if index < len(known.carried) else 0
            responses.append(self._running(draw, index, moved.get(index, draft)))
        self._launch_count += 1
        carried = sum(response.carried for response in responses)
        self._launches[draw] = _Launch(self._launch_count, command.replica_id, carried)
        shares = self._shares(command.replica_id, responses)
        self._where[draw] = tuple(shares)
        for name, share in shares.items():
            self.replicas[name].launch(self.now, share)
            self._dirty.add(name)

    def _running(self, draw: DrawId, index: int, given: int) -> RunningResponse:
        """The present attempt of a response; `given`: tokens that need no decoding."""
        known = self._launchables[draw]
        left = self._attempts.get((draw, index))
        return RunningResponse(
            draw,
            index,
            left[0] if left else known.lengths[index],
            known.prompt_tokens,
            tokens=given,
            carried=given,
            is_watched=draw not in self.plan.protected,
        )

    def _shares(
        self, first: str, responses: list[RunningResponse]
    ) -> dict[str, list[RunningResponse]]:
        """Which replica takes which responses of a group."""
        if not self._schedule.spreads_groups:
            return {first: responses}
        names = list(self.replicas)
        shares: dict[str, list[RunningResponse]] = {}
        for response in responses:
            shares.setdefault(names[self._turn % len(names)], []).append(response)
            self._turn += 1
        return shares

    def _abort(self, draw: DrawId) -> None:
        for name in self._where.pop(draw, ()):
            self.replicas[name].abort(self.now, draw)
            self._dirty.add(name)
