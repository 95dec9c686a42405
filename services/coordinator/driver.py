"""The main loop of a run: plan, round, step, commit, until nothing is left.

    state (Redis) -> tail_batching.plan -> Round (via CommandRunner) -> outcome (Redis)
         ^                                   | groups: sample stream         |
         +------- one fenced commit <- FinishStep (trainer) <----------------+

Three durable points make a crash harmless: the groups in the step's sample stream stay winners;
the outcome, written before FinishStep, fixes what the step trains and commits; the trainer's
recorded result makes a repeated FinishStep return what was done. Resuming walks the same points in
order, so the same draws are trained with the same seeds in the same steps.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial

from rollpacker.data.dataset import DataCursor
from rollpacker.data.run_data import RunData
from rollpacker.observability.tracing import span
from rollpacker.policy.round import Round
from rollpacker.policy.scale_down import ScaleDown, ScaleDownRules
from rollpacker.policy.tail_batching import Backlog, RoundPlan, new_prompt_budget, plan
from rollpacker.round_log import RoundArguments, RoundLog
from rollpacker.rpc.errors import FailedPreconditionError
from rollpacker.sampling import response_seeds
from rollpacker.settings import RunSettings
from rollpacker.store.draft_store import DraftStore
from rollpacker.store.records import RunState, StepOutcome, state_to_json
from rollpacker.store.run_store import RunStore
from rollpacker.store.sample_stream import SampleStream
from rollpacker.types import (
    Draw,
    DrawId,
    EngineSpec,
    Prompt,
    PromptGroup,
    SamplingParameters,
    StepRecord,
    StepResult,
)
from services.coordinator.alarm_watch import AlarmWatch
from services.coordinator.command_runner import CommandRunner, RoundResult
from services.coordinator.expected_lengths import expected_tokens
from services.coordinator.modes import tail_batching_rules
from services.coordinator.outcome import finished_record, round_outcome
from services.coordinator.parallelism import ParallelismPlanner
from services.coordinator.progress import RoundProgress
from services.coordinator.replicas import ReplicaSet
from services.coordinator.resuming import Resuming
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_context import RoundContext
from services.coordinator.run_context import RunContext
from services.coordinator.step_files import StepFiles, in_thread
from services.coordinator.trainer_client import RewindError, TrainerClient
from services.coordinator.validation import Validator

_STOPS = ("after_step", "immediately")
_log = logging.getLogger(__name__)


class RunDriver:
    """Drives one run. `run` returns when the run has ended; cancel it to stop at once."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._settings = context.settings
        self._rules = tail_batching_rules(context.settings)
        self._store = RunStore(context.redis, context.run_id)
        self._drafts = DraftStore(context.redis, context.run_id)
        self._rewards = RewardClient(context.workers, context.settings.reward, context.run_id)
        self._trainer = TrainerClient(
            context.workers, context.settings, context.run_id, context.fence
        )
        self._sampling = sampling_parameters(context.settings, context.data)
        tail = context.settings.tail_batching
        self._sizes = (
            ParallelismPlanner(tail.tensor_parallel_size, tail.max_tensor_parallel_size)
            if tail.max_tensor_parallel_size
            else None
        )
        self._alarms = AlarmWatch(self._store)
        self.validator = Validator(context, self._rewards, self._sampling)
        self._files = StepFiles(context)
        self._resuming = Resuming(context, self._trainer, self._files)
        self.stop_mode = ""

    async def run(self) -> str:
        """Go on from the commit point to the end; returns the final status.

        Raises ServiceError, RoundFailedError, StaleFenceError: the run cannot go on here.
        """
        state = await self._resuming.resume()
        self.stop_mode = self.stop_mode or state.stop_mode
        self._open_data(state)
        while self.stop_mode not in _STOPS:
            state = await self._validated(state)
            try:
                with span("step", is_root=True, run=self._context.run_id, step=state.step):
                    next_state = await self._step(state)
            except RewindError as error:
                next_state = await self._resuming.reconcile(state, error.opened)
            if next_state is None:
                break
            state = next_state
        ended_early = self.stop_mode in _STOPS or (
            self.stop_mode == "drain" and self._new_prompts(state, stopping=False) > 0
        )
        if not ended_early or self.stop_mode == "drain":
            await self._validate(state)
        await in_thread(self._context.outputs.finish)
        return "stopped" if ended_early else "succeeded"

    def _open_data(self, state: RunState) -> None:
        """Refuse data in which the cursor is another place; show what the model sees, as it sees
        it: most wrong templates are found by looking. Raises FailedPreconditionError."""
        data = self._context.data
        if state.data_digest not in ("", data.dataset.digest):
            raise FailedPreconditionError(
                "DATA_CHANGED",
                f"the data of run {state.run_id} is not what it was at its start (now"
                f" {len(data.dataset)} prompts, digest {data.dataset.digest}, then"
                f" {state.data_digest}); put the old rows back, or start another run",
            )
        taken, _ = data.dataset.take(DataCursor.from_json(state.cursor), 1)
        if data.overlong:
            _log.warning("%d over-long prompts are left out", data.overlong)
        for _, prompt in taken:
            tokens = len(prompt.token_ids)
            _log.info("next prompt %s, %d tokens: %r", prompt.prompt_id, tokens, prompt.text)

    async def abandon(self, step: int) -> None:
        """After a cancelled `run`: let the trainer drop the open step."""
        await self._trainer.abandon_step(step)

    # --- one step -----------------------------------------------------------------------------

    async def _step(self, state: RunState) -> RunState | None:
        """Plan, roll out, train and commit one step; None when nothing is left."""
        started = time.time()
        outcome = await self._store.outcome(state.step)
        if outcome is None:
            planned = plan(self._rules, self._backlog(state))
            if planned is None:
                return None
            outcome = await self._roll_out(state, planned, started)
        self._report("training", outcome.record)
        training_from = time.time()
        result = await self._finish(state, outcome)
        return await self._commit(outcome, result, time.time() - training_from)

    def _backlog(self, state: RunState) -> Backlog:
        deferred = tuple(item.draw for item in state.deferred)
        new_prompts = self._new_prompts(state, stopping=self.stop_mode == "drain")
        return Backlog(state.step, deferred, new_prompts)

    def _new_prompts(self, state: RunState, *, stopping: bool) -> int:
        if stopping:
            return 0
        cursor = DataCursor.from_json(state.cursor)
        max_steps = self._settings.max_steps
        return new_prompt_budget(
            self._rules,
            data_left=self._context.data.dataset.remaining(cursor),
            deferred=len(state.deferred),
            steps_left=max_steps - state.step if max_steps else None,
        )

    async def _roll_out(self, state: RunState, planned: RoundPlan, started: float) -> StepOutcome:
        """Run the round; fix in Redis what the step will train and commit."""
        draws, prompts, cursor = self._draws(state, planned)
        stream = SampleStream(self._context.redis, self._context.run_id, state.step)
        restored = await stream.read_all()
        if self._rules.streams:
            await self._trainer.start_step(state.step)
        result = await self._run_round(state, planned, draws, prompts, restored, stream)
        if not self._rules.streams:
            await self._trainer.start_step(state.step)
        outcome = round_outcome(
            state,
            planned,
            result,
            cursor,
            self._context.data.dataset.domain_of,
            started=started,
            ended=time.time(),
        )
        await self._drafts.save(result.drafts)
        await self._store.save_outcome(state.step, outcome)
        return outcome

    def _draws(
        self, state: RunState, planned: RoundPlan
    ) -> tuple[list[Draw], dict[DrawId, Prompt], DataCursor]:
        """The draws of a round with their seeds, their prompts, and the cursor behind them."""
        dataset = self._context.data.dataset
        taken, cursor = dataset.take(DataCursor.from_json(state.cursor), planned.new_prompts)
        seed, count = self._settings.seed, planned.response_count
        queued = [
            draw
            if self._rules.keeps_seeds
            else dataclasses.replace(
                draw, seeds=response_seeds(seed, draw.id, count, attempt=draw.level)
            )
            for draw in planned.queued
        ]
        new = [
            Draw(
                epoch=epoch,
                prompt_id=prompt.prompt_id,
                seeds=response_seeds(seed, DrawId(epoch, prompt.prompt_id), count),
                first_step=state.step,
            )
            for epoch, prompt in taken
        ]
        draws = [*queued, *new]
        prompts = {draw.id: dataset.by_id(draw.prompt_id) for draw in draws}
        return draws, prompts, cursor

    async def _run_round(
        self,
        state: RunState,
        planned: RoundPlan,
        draws: Sequence[Draw],
        prompts: dict[DrawId, Prompt],
        restored: Sequence[PromptGroup],
        stream: SampleStream,
    ) -> RoundResult:
        context = RoundContext(
            run_id=self._context.run_id,
            step=state.step,
            fence=self._context.fence,
            weight_version=state.weight_version,
            sampling=self._sampling,
            draws={draw.id: draw for draw in draws},
            prompts=prompts,
            tokenizer=self._context.data.tokenizer,
            drafts=await self._drafts.load([draw.id for draw in planned.queued]),
            carry_over_max_tokens=(
                self._settings.tail_batching.carry_over_max_tokens if self._rules.keeps_seeds else 0
            ),
        )
        sizes = self._sizes
        spec = EngineSpec(
            self._context.run_id,
            state.weight_version,
            state.weights_uri,
            tensor_parallel_size=sizes.size(planned.kind) if sizes else 0,
        )
        replicas = ReplicaSet(
            self._context.workers,
            spec,
            self._context.fence,
            needs_replay=self._rules.keeps_seeds and self._rules.levels > 0,
            group_count=len(draws),
            response_count=planned.response_count,
        )

        cap = self._sampling.max_response_tokens
        expected = expected_tokens(state, draws, prompts, cap)

        def on_progress(round_: Round) -> None:
            self._context.on_progress(RoundProgress.of_round(round_, planned, "rollout"))

        arguments = RoundArguments(self._rules, planned, tuple(draws), expected)
        log = RoundLog(arguments)
        runner = CommandRunner(
            arguments.make(),
            context,
            replicas,
            self._rewards,
            stream.append,
            on_progress,
            self._scale_down_of(state),
            log,
        )
        started = time.monotonic()
        result = await runner.run(restored)
        await in_thread(partial(self._context.outputs.write_round, state.step, log.lines))
        ready = replicas.first_ready_at or started
        if sizes:
            sizes.applied(spec.tensor_parallel_size, replicas.slowest_apply_seconds)
            sizes.after_round(planned.kind, result.preemptions, result.finish.rollout_seconds)
        return dataclasses.replace(
            result,
            apply_seconds=max(0.0, ready - started),
            tensor_parallel_size=spec.tensor_parallel_size,
        )

    def _scale_down_of(self, state: RunState) -> ScaleDown | None:
        """What may release replicas of a round; None: the run does not."""
        if not self._settings.tail_batching.scale_down:
            return None
        cap = self._sampling.max_response_tokens
        return ScaleDown(ScaleDownRules(), state.totals.trained_lengths, cap)

    async def _finish(self, state: RunState, outcome: StepOutcome) -> StepResult:
        tokens = outcome.next_state.totals.trained_tokens - state.totals.trained_tokens
        snapshot = state_to_json(outcome.next_state)
        return await self._trainer.finish_step(state.step, outcome.draws, snapshot, tokens)

    async def _commit(
        self, outcome: StepOutcome, result: StepResult, train_wait: float
    ) -> RunState:
        """Move the commit point; then write the outputs and drop what only the open step needed."""
        record = finished_record(outcome, result, train_wait=train_wait, now=time.time())
        record = await self._alarms.checked(record)
        state = dataclasses.replace(outcome.next_state, weights_uri=result.weights_uri)
        await self._store.commit(self._context.fence, state, record)
        await self._files.write(record.step)
        _log.info(
            "step %d (%s, level %d) is committed: reward %.3f, %d draws queued",
            record.step,
            record.round_kind.value,
            record.level,
            record.metrics["reward/mean"],
            len(state.deferred),
        )
        return state

    # --- held-out evaluation ------------------------------------------------------------------

    async def _validated(self, state: RunState) -> RunState:
        interval = self._settings.validation.interval
        due = state.step == 0 or (interval > 0 and state.step % interval == 0)
        due = due or self.validator.is_requested
        if due and await self._store.outcome(state.step) is None:
            await self._validate(state)
        return state

    async def _validate(self, state: RunState) -> None:
        self._context.on_progress(RoundProgress(state.step, phase="validation"))
        await self.validator.measure(state.weight_version, state.weights_uri)

    def _report(self, phase: str, record: StepRecord) -> None:
        self._context.on_progress(RoundProgress.of_record(record, phase))


def sampling_parameters(settings: RunSettings, data: RunData) -> SamplingParameters:
    """How training rounds sample; stop tokens default to the model's."""
    sampling = settings.sampling
    return SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=sampling.stop_token_ids or data.tokenizer.eos_token_ids,
    )
