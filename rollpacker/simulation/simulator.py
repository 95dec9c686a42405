"""A run: plan, round, training, commit of the queue, until the data are drained.

The loop is that of `services.coordinator.driver` with a virtual clock: the same `plan` on the same
backlog, the same `Round`, the queue kept in the same order.

    refit | rollout .......................... | reward tail | training (what is left) | update
            rewards and released GPUs' training meanwhile, where the mode streams

What never happens: a draw is trained twice, or left out; a time is taken from a real clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.engine_meter import EngineMeter
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import Backlog, RoundPlan, TailBatchingRules, plan, queue_on
from rollpacker.simulation.bubbles import BubbleDraft, begin
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.engine_speed import EngineSpeed, engine_speed
from rollpacker.simulation.parameters import Parameters
from rollpacker.simulation.redraws import Attempts, fresh_lengths, redrawn
from rollpacker.simulation.release import release_rule
from rollpacker.simulation.reward_model import RewardModel
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable, RoundTrace
from rollpacker.simulation.scenario import FRESH, Scenario
from rollpacker.simulation.schedule import Launched
from rollpacker.simulation.trainer_model import TrainerModel
from rollpacker.simulation.workload import RecordedWorkload, Workload
from rollpacker.types import DeferredDraw, Draw, DrawId, RoundKind


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step; seconds on the virtual clock."""

    step: int
    kind: RoundKind
    level: int
    refit_seconds: float  # and of the resize, if there was one
    rollout_seconds: float  # until the last response that was needed
    wait_seconds: float  # of these, after enough groups were complete to fill the step
    scored_seconds: float  # from the start of the rollout until everything kept has its reward
    reward_tail_seconds: float  # behind it
    train_seconds: float  # exposed: what is not hidden behind the rollout
    step_seconds: float
    decoded_tokens: int  # by the engines, aborted ones included, accepted drafts not
    trained_tokens: int
    trained_responses: int
    preemptions: int
    busy_seconds: float  # engines and trainer, averaged over the GPUs
    trained: tuple[DrawId, ...]
    ages: tuple[int, ...]
    factors: tuple[float, ...]  # of the rules that it ran under
    selection_weights: bool  # by these groups count by what deferral selects
    tensor_parallel_size: int  # that they ask for; 0: the scenario's
    kv_capacity: int  # tokens of a replica
    weight_kv_tokens: int  # of the model
    round: RoundTrace


Steer = Callable[[int, list["StepTrace"], TailBatchingRules], TailBatchingRules | None]


class Simulator:
    """A run of one scenario; iterate over its steps. Use once."""

    def __init__(
        self,
        scenario: Scenario,
        parameters: Parameters,
        workload: Workload | RecordedWorkload | None = None,
        steer: Steer | None = None,
    ) -> None:
        """`steer` may change the rules between steps (the planner does); None: they stay."""
        self.scenario = scenario
        self.parameters = parameters
        self.rules = self._wanted = scenario.rules
        count = scenario.steps * self.rules.prompts_per_step
        self.workload = workload or Workload(scenario.workload, count)
        self._speeds: dict[int, EngineSpeed] = {}  # by tensor-parallel size
        self._last_size = 0  # of the round before; 0: there was none
        self.release = release_rule(scenario)
        self._bubble_drafts: dict[int, BubbleDraft] = {}
        self._steer = steer
        self._reward = (
            RewardModel(
                parameters,
                scenario.workload.seed,
                adaptive_timeouts=scenario.adaptive_timeouts,
                knows_anchors=scenario.knows_anchors,
            )
            if scenario.scores
            else None
        )
        self._queue: tuple[DeferredDraw, ...] = ()
        self._next_number = 0
        self.now = 0.0

    def steps(self) -> Iterator[StepTrace]:
        """Until every draw of the workload has been trained."""
        done: list[StepTrace] = []
        while True:
            step = len(done)
            waits = self._steered(step, done)
            backlog = Backlog(
                step,
                tuple(item.draw for item in self._queue),
                0 if waits else len(self.workload) - self._next_number,
            )
            planned = plan(self.rules, backlog)
            if planned is None:
                return
            trace = self._step(planned)
            done.append(trace)
            yield trace

    def _steered(self, step: int, done: list[StepTrace]) -> bool:
        """Take new rules up; True while they wait for the queue's end, as rules without a level do
        (a ladder of none has no round for what was deferred)."""
        if self._steer is None:
            return False
        if not self._queue:
            self.rules = self._wanted  # also those that waited
        wanted = self._steer(step, done, self.rules) or self._wanted
        waits = not wanted.levels and bool(self._queue)
        self._wanted = wanted
        if not waits:
            self._queue = queue_on(wanted.levels, self._queue, self.rules.levels)
            self.rules = wanted
        return waits

    def _step(self, planned: RoundPlan) -> StepTrace:
        start = self.now
        draws = [*planned.queued, *self._new_draws(planned)]
        refit = self._refit_seconds(planned.level)
        replicas = self._replicas(start + refit, planned.level)
        trainer = TrainerModel(
            self.parameters,
            self.scenario.model,
            self.scenario.gpu_count,
            fetches_once=self.scenario.fetches_once,
        )
        round_trace = self._round(planned, draws, replicas, trainer, start + refit)
        finish = round_trace.finish
        assert finish is not None
        round_trace.spans = [(start + refit, replica.now) for replica in replicas]
        tail = self.parameters["reward_tail_seconds"] if self.scenario.scores else 0.0
        self.now = trainer.finish(round_trace.end + tail)
        self._keep_queue(planned, finish)
        self.release.learn(n for _, lengths in round_trace.emitted for n in lengths)
        begun = self._fill_bubbles(planned.step, round_trace, replicas)
        known = {draw.id: draw for draw in draws}
        return StepTrace(
            step=planned.step,
            kind=planned.kind,
            level=planned.level,
            refit_seconds=refit,
            rollout_seconds=finish.rollout_seconds,
            wait_seconds=finish.race_wait_seconds,
            scored_seconds=round_trace.end - round_trace.start,
            reward_tail_seconds=tail,
            train_seconds=self.now - round_trace.end - tail,
            step_seconds=self.now - start,
            decoded_tokens=sum(replica.decoded_tokens for replica in replicas) + begun,
            trained_tokens=round_trace.trained_tokens,
            trained_responses=sum(len(lengths) for _, lengths in round_trace.emitted),
            preemptions=sum(replica.preemptions for replica in replicas),
            busy_seconds=sum(r.busy_seconds for r in replicas) / len(replicas)
            + trainer.work_seconds
            + trainer.update_seconds,
            trained=finish.winners,
            ages=tuple(known[draw].age(planned.step) for draw in finish.winners),
            factors=self.rules.speculation_factors,
            selection_weights=self.rules.selection_weights,
            tensor_parallel_size=self.rules.tensor_parallel_size(planned.level),
            kv_capacity=replicas[0].speed.kv_capacity,
            weight_kv_tokens=self.scenario.model.weight_kv_tokens,
            round=round_trace,
        )

    def _round(
        self,
        planned: RoundPlan,
        draws: list[Draw],
        replicas: list[ReplicaModel],
        trainer: TrainerModel,
        start: float,
    ) -> RoundTrace:
        drafts = {item.draw.id: item for item in self._queue}
        launchables = {
            draw.id: self._launchable(planned, draw, drafts.get(draw.id)) for draw in draws
        }
        schedule = self.scenario.schedule
        expected = self._expected(draws, launchables)
        return RoundSimulation(
            Round(self.rules, planned, draws, expected),
            self.rules,
            planned,
            draws,
            launchables,
            replicas,
            self._reward,
            trainer,
            start,
            self._room(planned, len(draws)),
            self.release if self.scenario.scales_down else None,
            schedule,
            EngineMeter(self.parameters["prompt_tokens"]) if self._steer else None,
        ).run()

    def _expected(
        self, draws: list[Draw], launchables: dict[DrawId, Launchable]
    ) -> dict[DrawId, int] | None:
        """KV tokens of one response, as the schedule predicts them."""
        predict = self.scenario.schedule.predictor
        if predict is None:
            return None
        known = {item.draw.id: max(item.response_tokens, default=0) for item in self._queue}
        prompt = int(self.parameters["prompt_tokens"])
        unknown = self.scenario.workload.cap // 4
        expected = {}
        for draw in draws:
            lengths = launchables[draw.id].lengths[: self.rules.responses_per_prompt]
            number = int(draw.prompt_id)
            launched = Launched(self.workload, number, known.get(draw.id, 0), lengths)
            expected[draw.id] = prompt + (round(predict(launched)) or unknown)
        return expected

    def _room(self, planned: RoundPlan, groups: int) -> int:
        """Responses that each replica is given at a time: an even share, within its limits."""
        share = -(-groups // self._replica_count(planned.level)) * planned.response_count
        limit = self.scenario.admission_responses or self.speed_at(planned.level).max_running
        return min(share, limit)

    def _launchable(self, planned: RoundPlan, draw: Draw, draft: DeferredDraw | None) -> Launchable:
        number = int(draw.prompt_id)
        age = draw.age(planned.step)
        drift = self.scenario.drift if self.rules.keeps_seeds else FRESH
        launch = 0 if draft is None else max(1, draw.level)
        if draft is None:
            lengths = self.workload.lengths(number)
        else:
            lengths = drift.lengths(self.workload, number, age, launch)
        carried: list[int] = []
        attempts: Attempts = {}
        accept = self.scenario.schedule.bubble_acceptance
        if draft is None and accept is not None and number in self._bubble_drafts:
            begun = self._bubble_drafts.pop(number)
            share = accept(planned.step - begun.step)
            carried = [
                min(int(share * tokens), length - 1)
                for tokens, length in zip(begun.tokens, lengths, strict=False)
            ]
        elif draft is not None:
            accepted = drift.accepted(self.workload, number, age, draft.response_tokens)
            carried = [
                min(tokens, length - 1) for tokens, length in zip(accepted, lengths, strict=False)
            ]
            again = partial(fresh_lengths, self.workload, number, launch)
            lengths, attempts = redrawn(lengths, draft, self.scenario.redraws, again)
        return Launchable(
            lengths,
            carried,
            attempts,
            self.workload.task(number),
            number,
            int(self.parameters["prompt_tokens"]),
            self.scenario.workload.cap,
        )

    def _fill_bubbles(self, step: int, round_: RoundTrace, replicas: list[ReplicaModel]) -> int:
        """Begin the next prompts on idle replicas, if the schedule does; tokens decoded so."""
        if self.scenario.schedule.bubble_acceptance is None:
            return 0
        end = min(self._next_number + self.rules.launch_count(0), len(self.workload))
        width = self.rules.responses_per_prompt
        waiting = [
            (number, self.workload.lengths(number)[:width])
            for number in range(self._next_number, end)
            if number not in self._bubble_drafts
        ]
        seconds = round_.end - round_.start
        idle = [seconds - replica.busy_seconds for replica in replicas]
        begun = begin(step, waiting, idle, replicas[0].speed, int(self.parameters["prompt_tokens"]))
        self._bubble_drafts |= begun
        return sum(sum(draft.tokens) for draft in begun.values())

    def _new_draws(self, planned: RoundPlan) -> list[Draw]:
        first = self._next_number
        self._next_number += planned.new_prompts
        return [
            Draw(0, str(number), (), first_step=planned.step)
            for number in range(first, self._next_number)
        ]

    def _keep_queue(self, planned: RoundPlan, finish: FinishRound) -> None:
        taken = {draw.id for draw in planned.queued}
        queue = [item for item in self._queue if item.draw.id not in taken]
        queue += finish.deferred
        self._queue = tuple(sorted(queue, key=lambda item: item.draw.level))  # stable

    def speed_at(self, level: int) -> EngineSpeed:
        """Of a replica in the rounds of a level."""
        size = self._size_at(level)
        if size not in self._speeds:
            self._speeds[size] = engine_speed(self.parameters, self.scenario.model, size)
        return self._speeds[size]

    def _size_at(self, level: int) -> int:
        scenario = self.scenario
        usual = scenario.tensor_parallel_size or scenario.model.tensor_parallel_size
        return self.rules.tensor_parallel_size(level) or usual

    def _replica_count(self, level: int) -> int:
        return self.scenario.gpu_count // self._size_at(level)

    def _refit_seconds(self, level: int) -> float:
        """Of the round that follows, and of the resize if its engines need one."""
        refit = self.parameters[f"refit_seconds.{self.scenario.model.name}"]
        before, self._last_size = self._last_size, self._size_at(level)
        if before in (0, self._last_size):
            return refit
        resize = self.scenario.resize_seconds
        return refit + (self.parameters["resize_seconds"] if resize is None else resize)

    def _replicas(self, start: float, level: int) -> list[ReplicaModel]:
        replicas = [
            ReplicaModel(f"replica-{number:04d}", self.speed_at(level))
            for number in range(self._replica_count(level))
        ]
        for replica in replicas:
            replica.now = start
        return replicas
