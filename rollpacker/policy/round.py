"""One rollout round as a state machine: `handle(event)` returns what to do next.

The life of a group:

    WAITING --a replica has room--> RUNNING --R0 responses finished--> COMPLETE --ranked--> WON
       ^                               |                                  |                  |
       +--- replica lost, interrupted -+                                  |      rewards, in order
                                       |                                  |                  v
                                       +--------- lost the race ----------+--> LOST       EMITTED

    with dynamic sampling: RUNNING --finished--> FINISHED --rewards--> COMPLETE, or FLAT

The race (`rollpacker.policy.race`) alone says who wins; the round carries it out: it launches
waiting groups where there is room (one group on one replica, longest first, to the replica with
the fewest tokens outstanding and within its KV budget), sends finished responses to be scored,
aborts losers, and emits winners. Groups are emitted in the order of the race, so that in a token
race the trainer sums the same numbers in the same order whatever the timing.

With dynamic sampling a group enters the race when its rewards are known, and leaves it when they
are two or more and give no response an advantage: it is *flat* (`rollpacker.policy.flat_groups`).
Its bound stands in the race before that, so rewards delay the end of a round and never reorder it.

What never happens: a group is emitted twice, or with fewer than R0 responses; a response is
launched again after it finished; a reward decides who is kept, but for flat groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.policy.candidates import Candidates
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
    ProgressReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ResponseFinished,
    ResponseScored,
)
from rollpacker.policy.flat_groups import Replacements, dropped_draws
from rollpacker.policy.race import ArrivalRace, Race, TokenRace
from rollpacker.policy.rebalance import group_to_move
from rollpacker.policy.round_state import Group, GroupState, Replica
from rollpacker.policy.scale_down import ReplicaLoad
from rollpacker.policy.tail_batching import RaceKind, RoundPlan, Routing, TailBatchingRules
from rollpacker.types import DeferredDraw, Draw, DrawId


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
        self._waiting = sorted(ids, key=lambda i: -self._groups[i].expected_tokens)  # stable
        race_class = TokenRace if rules.race is RaceKind.TOKENS else ArrivalRace
        self._race: Race = race_class(ids, plan.keep, plan.protected)
        self._keep = plan.keep  # less where the data ends
        self._replacements = Replacements(rules, plan, len(ids))
        self._replicas: dict[str, Replica] = {}
        self._ranked: list[DrawId] = []  # winners that are not emitted yet, in order
        self._may_emit = False  # one of them is new, or has its last reward
        self._emitted: list[DrawId] = []
        self._held_scores: list[ScoreResponse] = []  # in a round that does not stream
        self._first_at: float | None = None
        self._filled_at: float | None = None  # enough groups complete to fill the step
        self._decided_at: float | None = None
        self._over = False
        self._complete_count = 0

    @property
    def over(self) -> bool:
        """Whether FinishRound has been returned."""
        return self._over

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
        groups = self._groups.values()
        total = sum(group.response_count for group in groups)
        return sum(len(group.finished) for group in groups) / total

    def replica_loads(self, prompt_tokens: Mapping[DrawId, int]) -> list[ReplicaLoad]:
        """What runs where; empty while a group waits for room, as every replica is needed then."""
        if self._waiting:
            return []
        return [
            replica.load(name, self._groups, prompt_tokens)
            for name, replica in self._replicas.items()
            if not replica.draining
        ]

    def group_to_move(self) -> tuple[DrawId, str] | None:
        """A running group that an idle replica should take over, and where it runs.

        It is for the caller to interrupt it there (GroupInterrupted), or to leave it.
        """
        deals_in_turn = self._rules.routing is Routing.ROUND_ROBIN  # not to where there is room
        if self._over or deals_in_turn or not self.idle_replicas():
            return None
        return group_to_move(self._replicas, self._groups)

    def idle_replicas(self) -> tuple[str, ...]:
        """Those that run no group, while others run the last ones and none waits."""
        replicas = self._replicas.items()
        if self._waiting or not any(replica.running for _, replica in replicas):
            return ()
        return tuple(n for n, r in replicas if not r.running and not r.draining)

    def outstanding(self) -> dict[DrawId, GroupState]:
        """The groups that the round still waits for, for logs."""
        done = (GroupState.EMITTED, GroupState.LOST, GroupState.FLAT)
        return {i: g.state for i, g in self._groups.items() if g.state not in done}

    def handle(self, event: Event) -> list[Command]:
        """Take one event; return the commands that it causes. Raises UnknownDrawError."""
        if self._over:
            return []
        if self._first_at is None:
            self._first_at = event.at
        commands = self._take(event)
        commands += self._replace_flat()
        commands += self._settle(event.at)
        if not (isinstance(event, ReplicaJoined) and event.others_follow):
            commands += self._launch()
        commands += self._emit()
        if len(self._emitted) == self._keep and self._nothing_is_open():
            self._over = True
            commands.append(self._outcome(event.at))
        return commands

    def _nothing_is_open(self) -> bool:
        """With dynamic sampling, after a crash: whether it is known again which groups are flat."""
        opened = (GroupState.WAITING, GroupState.RUNNING, GroupState.FINISHED)
        return not self._rules.dynamic_sampling or not any(
            group.state in opened for group in self._groups.values()
        )

    def _take(self, event: Event) -> list[Command]:
        match event:
            case ReplicaJoined():
                self._replica_joined(event)
            case ReplicaLost():
                self._replica_lost(event)
            case ReplicaDraining():
                self._replica_draining(event)
            case GroupInterrupted():
                group = self._group(event.draw)
                if group.replica_id == event.replica_id:
                    self._interrupted(group)
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

    def _replica_joined(self, event: ReplicaJoined) -> None:
        known = self._replicas.setdefault(event.replica_id, Replica(0, 0))
        known.capacity, known.draining = event.response_capacity, False
        known.kv_budget_tokens = event.kv_budget_tokens

    def _replica_draining(self, event: ReplicaDraining) -> None:
        replica = self._replicas.get(event.replica_id)
        if replica is not None:
            replica.draining = True

    def _replica_lost(self, event: ReplicaLost) -> None:
        replica = self._replicas.pop(event.replica_id, None)
        if replica is None:
            return
        for draw in [i for i in self._groups if i in replica.running]:  # in launch order
            self._interrupted(self._groups[draw])

    def _interrupted(self, group: Group) -> None:
        if group.state is not GroupState.RUNNING:
            return
        self._release(group)
        group.state = GroupState.WAITING
        group.end_launch()
        self._waiting.insert(0, group.draw.id)

    def _progress(self, event: ProgressReported) -> None:
        group = self._group(event.draw)
        if group.state is not GroupState.RUNNING:
            return
        group.longest_tokens = max(group.longest_tokens, event.longest_tokens)
        group.running_tokens = max(0, event.total_tokens - group.launch_finished_tokens)
        decoded = event.total_tokens - event.carried_tokens
        group.running_decoded = max(0, decoded - group.launch_finished_decoded)
        self._race.progress(event.draw, group.longest_tokens)

    def _finished(self, event: ResponseFinished) -> list[Command]:
        group = self._group(event.draw)
        if event.index in group.finished:
            return []
        if group.state is GroupState.RUNNING:
            self._replicas[group.replica_id].used -= 1
        elif group.state is not GroupState.WAITING:  # there: late news of a replica that is lost
            return []
        decoded = event.tokens - event.carried_tokens
        group.finished[event.index] = event.tokens
        group.launch_finished_tokens += event.tokens
        group.running_tokens = max(0, group.running_tokens - event.tokens)
        group.finished_decoded += decoded
        group.launch_finished_decoded += decoded
        group.running_decoded = max(0, group.running_decoded - decoded)
        group.longest_tokens = max(group.longest_tokens, event.tokens)
        self._race.progress(event.draw, group.longest_tokens)
        commands = self._score(ScoreResponse(event.draw, event.index))
        if len(group.finished) == self._rules.responses_per_prompt:
            commands += self._complete(group, event.at)
        return commands

    def _complete(self, group: Group, at: float) -> list[Command]:
        surplus = group.response_count > len(group.finished)
        if group.state is GroupState.WAITING:
            self._waiting.remove(group.draw.id)
            surplus = False  # nothing runs
        self._release(group)
        group.state = GroupState.FINISHED
        group.cut()
        group.end_launch()
        if not self._rules.dynamic_sampling:
            self._enter_race(group, at)
        return [AbortGroup(group.draw.id)] if surplus else []

    def _enter_race(self, group: Group, at: float) -> None:
        group.state = GroupState.COMPLETE
        self._complete_count += 1
        self._race.complete(group.draw.id, max(group.finished.values()))
        if self._filled_at is None and self.complete_count >= self._keep:
            self._filled_at = at

    def _scored(self, event: ResponseScored) -> None:
        group = self._group(event.draw)
        group.rewards[event.index] = event.reward
        self._may_emit |= group.state is GroupState.WON and group.is_scored()
        if group.state is not GroupState.FINISHED or not group.is_scored():
            return
        is_flat = group.is_flat(self._rules.advantages)
        if not (is_flat and self._replacements.gives_way(group.draw.id)):
            self._enter_race(group, event.at)
            return
        group.state = GroupState.FLAT
        self._replacements.note_flat(group.draw.id)
        self._race.withdraw(group.draw.id)

    def _replace_flat(self) -> list[Command]:
        missing = self._replacements.take_missing()
        return [RequestDraws(missing)] if missing else []

    def _added(self, event: DrawsAdded) -> None:
        for draw in event.draws:
            self._groups[draw.id] = Group(draw, self._plan.response_count, expected_tokens=1)
            self._waiting.append(draw.id)
            self._race.add(draw.id)
        self._replacements.note_added(draw.id for draw in event.draws)
        self._keep -= event.requested - len(event.draws)
        for restored in event.restored:
            self._restored(restored)

    def _score(self, command: ScoreResponse) -> list[Command]:
        if self._rules.streams:
            return [command]
        self._held_scores.append(command)
        return []

    def _restored(self, event: GroupRestored) -> None:
        group = self._group(event.draw)
        if group.state is not GroupState.WAITING:
            return
        self._waiting.remove(event.draw)
        group.finished = dict(enumerate(event.response_tokens))
        group.finished_decoded = sum(event.response_tokens) - event.carried_tokens
        group.longest_tokens = max(event.response_tokens, default=0)
        group.rewards = dict.fromkeys(group.finished)
        group.state = GroupState.EMITTED
        self._complete_count += 1
        self._emitted.append(event.draw)
        self._race.complete(event.draw, group.longest_tokens)

    def _settle(self, at: float) -> list[Command]:
        """Carry out what the race has decided."""
        for draw in self._race.take_winners():
            group = self._groups[draw]
            if group.state is GroupState.COMPLETE:
                group.state = GroupState.WON
                self._ranked.append(draw)
                self._may_emit = True
        commands: list[Command] = []
        for draw in self._race.take_losers():
            commands += self._lose(self._groups[draw])
        if self._decided_at is None and len(self._ranked) + len(self._emitted) == self._keep:
            self._decided_at = at
        if self._held_scores and self._may_score():
            commands += self._held_scores
            self._held_scores = []
        return commands

    def _may_score(self) -> bool:
        """In a round that does not stream: whether the rollout is over, as far as is known."""
        if not self._rules.dynamic_sampling:
            return self._decided_at is not None
        return not self._waiting and not any(r.running for r in self._replicas.values())

    def _lose(self, group: Group) -> list[Command]:
        was_running = group.state is GroupState.RUNNING
        if group.state is GroupState.WAITING:
            self._waiting.remove(group.draw.id)
        self._complete_count -= group.state is GroupState.COMPLETE
        self._release(group)
        group.state = GroupState.LOST
        return [AbortGroup(group.draw.id)] if was_running else []

    def _launch(self) -> list[Command]:
        """Fill the replicas with waiting groups, in their order."""
        if not self._waiting:
            return []
        commands: list[Command] = []
        candidates = Candidates(self._replicas, self._outstanding_of, self._rules.routing)
        while self._waiting:
            group = self._groups[self._waiting[0]]
            tokens = group.outstanding_tokens()
            candidate = candidates.take(len(group.missing()), tokens)
            if candidate is None:
                break
            del self._waiting[0]
            indices = group.missing()
            group.state, group.replica_id = GroupState.RUNNING, candidate.name
            group.launch_finished_tokens = group.launch_finished_decoded = 0
            candidate.replica.running.add(group.draw.id)
            candidate.replica.used += len(indices)
            candidate.replica.turns += 1
            candidate.outstanding += tokens
            candidates.put_back(candidate)
            commands.append(LaunchGroup(group.draw.id, candidate.name, indices))
        return commands

    def _outstanding_of(self, replica: Replica) -> int:
        return sum(self._groups[draw].outstanding_tokens() for draw in replica.running)

    def _release(self, group: Group) -> None:
        replica = self._replicas.get(group.replica_id)
        if replica is not None and group.draw.id in replica.running:
            replica.running.discard(group.draw.id)
            replica.used -= len(group.missing())

    def _emit(self) -> list[Command]:
        if not self._may_emit:
            return []
        self._may_emit = False
        commands: list[Command] = []
        ready = self._scored_winners()
        for draw in ready:
            group = self._groups[draw]
            indices = tuple(sorted(group.finished))
            group.state = GroupState.EMITTED
            self._emitted.append(draw)
            commands.append(EmitGroup(draw, indices, group.advantages(self._rules.advantages)))
        if ready:
            self._ranked = [
                draw for draw in self._ranked if self._groups[draw].state is GroupState.WON
            ]
        return commands

    def _scored_winners(self) -> list[DrawId]:
        """Winners with all their rewards; in a token race, up to the first without."""
        ready = []
        for draw in self._ranked:
            group = self._groups[draw]
            if group.is_scored():
                ready.append(draw)
            elif self._rules.race is RaceKind.TOKENS:
                break
        return ready

    def _outcome(self, at: float) -> FinishRound:
        start = self._first_at if self._first_at is not None else at
        decided = self._decided_at if self._decided_at is not None else at
        filled = self._filled_at if self._filled_at is not None else decided
        flat = dropped_draws(self._rules, self._plan, self._groups, self._replacements.holders)
        lost = [
            group
            for draw, group in self._groups.items()
            if group.state is not GroupState.EMITTED and draw not in flat
        ]
        return FinishRound(
            winners=tuple(self._emitted),
            deferred=tuple(self._deferred(group) for group in lost),
            generated_tokens=sum(group.decoded for group in self._groups.values()),
            rollout_seconds=decided - start,
            race_wait_seconds=max(0.0, decided - filled),
            flat=tuple(draw for draw in self._groups if draw in flat),
            cut_tokens=tuple(
                tokens for draw in self._emitted for tokens in self._groups[draw].cut_tokens
            ),
        )

    def _deferred(self, group: Group) -> DeferredDraw:
        """The draw one level up."""
        old = group.draw
        level = min(old.level + 1, self._rules.levels)
        so_far = group.tokens_so_far()
        kept = range(self._rules.responses_per_prompt)
        return DeferredDraw(
            draw=Draw(old.epoch, old.prompt_id, old.seeds, level, old.first_step),
            response_tokens=tuple(group.finished.get(index, so_far) for index in kept),
            finished=tuple(index in group.finished for index in kept),
        )

    def _group(self, draw: DrawId) -> Group:
        try:
            return self._groups[draw]
        except KeyError:
            raise UnknownDrawError(f"draw {draw} is not in round {self._plan.step}") from None
