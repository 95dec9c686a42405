"""One rollout round as a state machine: `handle(event)` returns what to do next.

The life of a group:

    WAITING --a replica has room--> RUNNING --R0 responses finished--> COMPLETE --ranked--> WON
       ^                               |                                  |                  |
       +--- replica lost, interrupted -+                                  |      rewards, in order
                                       |                                  |                  v
                                       +--------- lost the race ----------+--> LOST       EMITTED

    with dynamic sampling: RUNNING --finished--> FINISHED --rewards--> COMPLETE, or FLAT

Three parts say the rest, and each can be read alone:

    placement  where groups run: waiting groups and replicas     (WAITING, RUNNING)
    race       who is kept, and in which order                   (COMPLETE -> WON or LOST)
    winners    when they go to the trainer                       (WON -> EMITTED)

The round carries the news from one to the other, sends finished responses to be scored, and aborts
losers. Every event takes the same way: `handle` tells the parts, settles what the race has decided,
launches where there is room, emits what is scored, and ends the round when all is emitted.

With dynamic sampling a group enters the race when its rewards are known, and leaves it when they
are two or more and give no response an advantage: it is *flat* (`rollpacker.policy.flat_groups`).
Its bound stands in the race before that, so rewards delay the end of a round and never reorder it.

What never happens: a group is emitted twice, or with fewer than R0 responses; a response is
launched again after it finished; a reward decides who is kept, but for flat groups. An event costs
the logarithm of the number of groups, except where a replica comes or goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.policy.commands import AbortGroup, Command, EmitGroup, RequestDraws, ScoreResponse
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
from rollpacker.policy.flat_groups import Replacements
from rollpacker.policy.placement import Placement
from rollpacker.policy.race import ArrivalRace, Race, TokenRace
from rollpacker.policy.round_end import RoundTimes, finish_round
from rollpacker.policy.round_state import Group, GroupState
from rollpacker.policy.scale_down import ReplicaLoad
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, TailBatchingRules
from rollpacker.policy.winners import Winners
from rollpacker.types import Draw, DrawId

_OPEN = (GroupState.WAITING, GroupState.RUNNING, GroupState.FINISHED)


class UnknownDrawError(KeyError):
    """An event names a draw that this round did not launch: a bug of the caller."""


class Round:
    """One round. Feed it every event; carry out every command, in order."""

    def __init__(
        self,
        rules: TailBatchingRules,
        plan: RoundPlan,
        draws: Sequence[Draw],
        expected_tokens: Mapping[DrawId, int] | None = None,
    ) -> None:
        """`draws` are the plan's queued draws and the new ones, in the order of the race.

        `expected_tokens`: what history says that one response of a draw needs, prompt included;
        draws that are left out count 1. It decides where and when a group runs, never who wins.
        """
        self._rules = rules
        self._plan = plan
        ids = [draw.id for draw in draws]
        if len(set(ids)) != len(ids):
            raise ValueError(f"round {plan.step}: a draw is launched twice: {ids}")
        if len(ids) < plan.keep:
            raise ValueError(f"round {plan.step}: {len(ids)} draws cannot fill {plan.keep} places")
        expected = expected_tokens or {}
        self._groups = {
            draw.id: Group(draw, plan.response_count, expected.get(draw.id, 1)) for draw in draws
        }
        self._placement = Placement(self._groups, rules.routing)
        race_class = TokenRace if rules.race is RaceKind.TOKENS else ArrivalRace
        self._race: Race = race_class(ids, plan.keep, plan.protected)
        self._winners = Winners(in_order=rules.race is RaceKind.TOKENS)
        self._keep = plan.keep  # less where the data ends
        self._replacements = Replacements(rules, plan, len(ids))
        self._held_scores: list[ScoreResponse] = []  # in a round that does not stream
        self._times = RoundTimes()
        self._over = False
        self._complete_count = 0
        self._finished_responses = 0

    # --- how it is ----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether FinishRound has been returned."""
        return self._over

    @property
    def responses_per_prompt(self) -> int:
        """R0: with so many a group is complete."""
        return self._rules.responses_per_prompt

    @property
    def complete_count(self) -> int:
        """Groups that have all their responses and are in the race."""
        return self._complete_count

    @property
    def launched_count(self) -> int:
        """Groups of the round."""
        return len(self._groups)

    @property
    def deciding_tokens(self) -> int | None:
        """Running groups with more tokens than this in their longest response have lost."""
        return self._race.deciding_tokens

    def would_lose(self, draw: DrawId, key: int) -> list[DrawId]:
        """Running and waiting groups that lose, by what is known now, once `draw` is complete and
        its longest response has `key` tokens."""
        return self._race.would_lose(draw, key)

    @property
    def finished_share(self) -> float:
        """Responses that have finished, of all that the round samples, 0 to 1."""
        return self._finished_responses / (len(self._groups) * self._plan.response_count)

    def replica_loads(self, prompt_tokens: Mapping[DrawId, int]) -> list[ReplicaLoad]:
        """What runs where; empty while a group waits for room, as every replica is needed then."""
        return self._placement.loads(prompt_tokens)

    def has_lost(self, draw: DrawId) -> bool:
        """Whether the race has decided against a group."""
        return self._group(draw).state is GroupState.LOST

    def group_to_move(self) -> tuple[DrawId, str] | None:
        """A running group that an idle replica should take over, and where it runs.

        It is for the caller to interrupt it there (GroupInterrupted), or to leave it.
        """
        return None if self._over else self._placement.group_to_move()

    def idle_replicas(self) -> tuple[str, ...]:
        """Those that run no group, while others run the last ones and none waits."""
        return self._placement.idle_replicas()

    def outstanding(self) -> dict[DrawId, GroupState]:
        """The groups that the round still waits for, for logs."""
        done = (GroupState.EMITTED, GroupState.LOST, GroupState.FLAT)
        return {i: g.state for i, g in self._groups.items() if g.state not in done}

    # --- what happens -------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return the commands that it causes. Raises UnknownDrawError."""
        if self._over:
            return []
        if self._times.first is None:
            self._times.first = event.at
        commands = self._take(event)
        commands += self._replace_flat()
        commands += self._settle(event.at)
        if not (isinstance(event, ReplicaJoined) and event.others_follow):
            commands += self._placement.launch()
        commands += self._emit()
        if len(self._winners.emitted) == self._keep and self._nothing_is_open():
            self._over = True
            commands.append(
                finish_round(
                    self._rules,
                    self._plan,
                    self._groups,
                    self._winners.emitted,
                    self._replacements.holders,
                    self._race.cut,
                    self._times,
                    event.at,
                )
            )
        return commands

    def _nothing_is_open(self) -> bool:
        """With dynamic sampling, after a crash: whether it is known again which groups are flat."""
        return not self._rules.dynamic_sampling or not any(
            group.state in _OPEN for group in self._groups.values()
        )

    def _take(self, event: Event) -> list[Command]:
        match event:
            case ReplicaJoined():
                self._placement.joined(event)
            case ReplicaLost():
                self._placement.lost(event.replica_id)
            case ReplicaDraining():
                self._placement.draining(event.replica_id)
            case GroupInterrupted():
                self._placement.interrupted(self._group(event.draw), event.replica_id)
            case ProgressReported():
                self._progress(event)
            case ResponseFinished():
                return self._finished(event)
            case ResponseScored():
                self._scored(event)
            case GroupRestored():
                self._restored(event)
            case DrawsAdded():
                self._added(event)
        return []

    def _progress(self, event: ProgressReported) -> None:
        group = self._group(event.draw)
        if group.state is not GroupState.RUNNING:
            return
        group.progress(event.longest_tokens, event.total_tokens, event.carried_tokens)
        self._race.progress(event.draw, group.longest_tokens)

    def _finished(self, event: ResponseFinished) -> list[Command]:
        group = self._group(event.draw)
        if event.index in group.finished:
            return []
        if group.state is GroupState.RUNNING:
            self._placement.response_finished(group)
        elif group.state is not GroupState.WAITING:  # there: late news of a replica that is lost
            return []
        group.finish(event.index, event.tokens, event.carried_tokens)
        self._finished_responses += 1
        self._race.progress(event.draw, group.longest_tokens)
        commands = self._score(ScoreResponse(event.draw, event.index))
        if len(group.finished) == self._rules.responses_per_prompt:
            commands += self._complete(group, event.at)
        return commands

    def _complete(self, group: Group, at: float) -> list[Command]:
        has_surplus = group.state is GroupState.RUNNING and bool(group.missing())
        self._placement.take_off(group)
        group.state = GroupState.FINISHED
        group.cut()
        group.end_launch()
        if not self._rules.dynamic_sampling:
            self._enter_race(group, at)
        return [AbortGroup(group.draw.id)] if has_surplus else []

    def _enter_race(self, group: Group, at: float) -> None:
        group.state = GroupState.COMPLETE
        self._complete_count += 1
        self._race.complete(group.draw.id, max(group.finished.values()))
        if self._times.filled is None and self._complete_count >= self._keep:
            self._times.filled = at

    def _scored(self, event: ResponseScored) -> None:
        group = self._group(event.draw)
        group.rewards[event.index] = event.reward
        if not group.is_scored():
            return
        if group.state is GroupState.WON:
            self._winners.scored(group)
        elif group.state is GroupState.FINISHED:
            self._weigh(group, event.at)

    def _weigh(self, group: Group, at: float) -> None:
        """With dynamic sampling: a group with all its rewards races, or is flat."""
        is_flat = group.is_flat(self._rules.advantages)
        if not (is_flat and self._replacements.gives_way(group.draw.id)):
            self._enter_race(group, at)
            return
        group.state = GroupState.FLAT
        self._replacements.note_flat(group.draw.id)
        self._race.withdraw(group.draw.id)

    def _restored(self, event: GroupRestored) -> None:
        group = self._group(event.draw)
        if group.state is not GroupState.WAITING:
            return
        group.restore(event.response_tokens, event.carried_tokens)
        self._finished_responses += len(event.response_tokens)
        self._winners.restored(group)
        self._complete_count += 1
        self._race.complete(event.draw, group.longest_tokens)

    def _added(self, event: DrawsAdded) -> None:
        for draw in event.draws:
            group = Group(draw, self._plan.response_count, expected_tokens=1)
            self._groups[draw.id] = group
            self._placement.added(group)
            self._race.add(draw.id)
        self._replacements.note_added(draw.id for draw in event.draws)
        self._keep -= event.requested - len(event.draws)
        for restored in event.restored:
            self._restored(restored)

    # --- what follows -------------------------------------------------------------------------

    def _score(self, command: ScoreResponse) -> list[Command]:
        if self._rules.streams:
            return [command]
        self._held_scores.append(command)
        return []

    def _replace_flat(self) -> list[Command]:
        missing = self._replacements.take_missing()
        return [RequestDraws(missing)] if missing else []

    def _settle(self, at: float) -> list[Command]:
        """Carry out what the race has decided."""
        for draw in self._race.take_winners():
            if self._groups[draw].state is GroupState.COMPLETE:
                self._winners.won(self._groups[draw])
        commands: list[Command] = []
        for draw in self._race.take_losers():
            commands += self._lose(self._groups[draw])
        if self._times.decided is None and self._winners.count == self._keep:
            self._times.decided = at
        if self._held_scores and self._may_score():
            commands += self._held_scores
            self._held_scores = []
        return commands

    def _may_score(self) -> bool:
        """In a round that does not stream: whether the rollout is over, as far as is known."""
        if not self._rules.dynamic_sampling:
            return self._times.decided is not None
        return self._placement.is_at_rest()

    def _lose(self, group: Group) -> list[Command]:
        was_running = group.state is GroupState.RUNNING
        self._complete_count -= group.state is GroupState.COMPLETE
        self._placement.take_off(group)
        group.state = GroupState.LOST
        return [AbortGroup(group.draw.id)] if was_running else []

    def _emit(self) -> list[Command]:
        return [
            EmitGroup(
                group.draw.id,
                tuple(sorted(group.finished)),
                group.advantages(self._rules.advantages),
            )
            for group in self._winners.take()
        ]

    def _group(self, draw: DrawId) -> Group:
        try:
            return self._groups[draw]
        except KeyError:
            raise UnknownDrawError(f"draw {draw} is not in round {self._plan.step}") from None
