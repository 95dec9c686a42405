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

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine
from typing import Any

from rollpacker.observability.tracing import span
from rollpacker.policy.tail_batching import Backlog, RoundPlan, new_prompt_budget, plan
from rollpacker.rpc.errors import ServiceError
from rollpacker.settings import RunSettings
from rollpacker.store.draft_store import DraftStore
from rollpacker.store.records import RunState, StepOutcome, state_to_json
from rollpacker.store.run_store import RunStore
from rollpacker.store.sample_stream import SampleStream
from rollpacker.tasks import end_tasks
from rollpacker.types import (
    StepRecord,
    StepResult,
)
from rollpacker.v1 import coordinator_service_pb2
from services.coordinator.alarm_watch import AlarmWatch
from services.coordinator.changes import (
    change_from_json,
    settings_in_force,
    settled,
    to_drop,
    with_ladder,
)
from services.coordinator.control import RunControl
from services.coordinator.garbage import full_collections_wait
from services.coordinator.ladder_planning import chosen_ladder
from services.coordinator.modes import tail_batching_rules
from services.coordinator.outcome import finished_record, round_outcome
from services.coordinator.progress import RoundProgress
from services.coordinator.prompt_source import PromptSource
from services.coordinator.resuming import Resuming
from services.coordinator.reward_client import RewardClient
from services.coordinator.round_draws import RoundDraws
from services.coordinator.round_runner import RoundRunner, sampling_parameters
from services.coordinator.run_context import RunContext
from services.coordinator.step_files import StepFiles, in_thread
from services.coordinator.trainer_client import RewindError, TrainerClient
from services.coordinator.validation import Validator

_ABANDON_SECONDS = 5.0  # people wait for it
_log = logging.getLogger(__name__)


class RunDriver:
    """Drives one run. `run` returns when the run has ended; cancel it to leave the run open."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context = context
        self._control = control
        self._store = RunStore(context.redis, context.run_id)
        self._drafts = DraftStore(context.redis, context.run_id)
        self._rounds = RoundRunner(context, self._drafts)
        self._trainer = TrainerClient(
            context.workers, context.settings, context.run_id, context.fence
        )
        self._alarms = AlarmWatch(self._store)
        self.validator = Validator(context)
        self._files = StepFiles(context)
        self._resuming = Resuming(context, self._trainer, self._files)
        self.prompts = PromptSource(context, self._store)
        self._use(context.settings)

    async def run(self) -> str:
        """Go on from the commit point to the end; returns the final status.

        Raises ServiceError, RoundFailedError, StaleFenceError: the run cannot go on here.
        """
        while True:
            ended = await self._unless_interrupted(self._go_on())
            if ended:
                return ended
            await self._abandon()

    async def save_checkpoint(self) -> int:
        """SaveCheckpoint; returns the version that it holds."""
        return await self._trainer.save_checkpoint()

    def lengths(self) -> tuple[int, int, str]:
        """Tokens of the longest prompt; and of the longest sequence, as `shortest_context` does."""
        limit = self._context.workers.shortest_context(self._context.data.context_tokens)
        return (self.prompts.longest(), *limit)

    async def _go_on(self) -> str:
        """Step after step; a paused run asks nobody until it is resumed."""
        await self._store.claim(self._context.fence)
        await self._gate(await self._resuming.load())
        if self._control.stops:
            await in_thread(self._context.outputs.finish)
            return "stopped"
        state = await self._resuming.resume()
        self.prompts.open(state)
        while True:
            state = await self._steps(state)
            if self._control.stops:
                break
            await self._validate(state)
            if self._control.stops or not await self._more_is_asked(state):
                break
            state = dataclasses.replace(state, begun_step=-1)  # it holds nothing: settle it again
        await in_thread(self._context.outputs.finish)
        left = self._control.drains and self._new_prompts(state, stopping=False) > 0
        return "stopped" if self._control.stops or left else "succeeded"

    async def _steps(self, state: RunState) -> RunState:
        """Step after step, until no further one may begin or nothing is left."""
        while await self._gate(state):
            state = await self._begun(state)
            state = await self._validated(state)
            try:
                with (
                    span("step", is_root=True, run=self._context.run_id, step=state.step),
                    full_collections_wait(),
                ):
                    next_state = await self._step(state)
            except RewindError as error:
                next_state = await self._resuming.reconcile(state, error.opened)
            if next_state is None:
                break
            state = next_state
        return state

    async def _more_is_asked(self, state: RunState) -> bool:
        """Whether changes or prompts came since the last step was settled."""
        return await self._store.log_lengths() != (state.change_count, state.added_known)

    async def _gate(self, state: RunState) -> bool:
        """Wait while the run is paused; False when no further step may begin."""
        control = self._control
        while not control.stops:
            if not control.pauses(state):
                return True
            if control.paused:
                await control.wait(f"ResumeRun of {state.run_id}, which is paused")
                continue
            async with control.lock:
                control.paused = control.pauses(state)
                if control.paused:
                    await self._store.set_status(
                        self._context.fence, "paused", only_from=("running", "pausing")
                    )
        return False

    async def _unless_interrupted(self, work: Coroutine[Any, Any, str]) -> str:
        """The final status; empty when people wanted the step to end at once."""
        working = asyncio.create_task(work)
        interrupted = asyncio.create_task(self._control.interrupted())
        try:
            await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else ""
        finally:
            await end_tasks(working, interrupted)

    async def _abandon(self) -> None:
        """After an interruption: let the trainer, if there is one, drop the open step."""
        if not self._context.workers.alive(coordinator_service_pb2.WORKER_KIND_TRAINER):
            return
        state = await self._resuming.load()
        try:
            await self._trainer.abandon_step(state.step, _ABANDON_SECONDS)
        except ServiceError as error:
            level = logging.DEBUG if error.reason == "STEP_FINISHED" else logging.WARNING
            _log.log(level, "step %d of %s is not abandoned: %s", state.step, state.run_id, error)

    # --- settings and changes -----------------------------------------------------------------

    def _use(self, settings: RunSettings) -> None:
        """These settings hold from the next round on."""
        context = self._context
        self._settings = settings
        self._rules = tail_batching_rules(settings)
        # Gradients start while the rollout runs, where both have devices.
        self._trains_early = self._rules.streams and settings.placement == "separate"
        sampling = sampling_parameters(settings, context.data)
        rewards = RewardClient(context.workers, settings.reward, context.run_id)
        self._rounds.use(settings, self._rules, sampling, rewards)
        self.validator.use(rewards, sampling)
        self._trainer.use(settings)

    async def _begun(self, state: RunState) -> RunState:
        """The state with the changes that this step is to contain; settled once for each step."""
        if state.begun_step != state.step:
            before = state
            log = await self._store.changes_from(state.change_count)
            _, added_known = await self._store.log_lengths()
            await self.prompts.know(added_known)
            changes = [change_from_json(text) for text in log]
            state = dataclasses.replace(state, added_known=added_known)
            state = settled(state, changes, self.prompts.ahead(state, to_drop(changes)))
            ladder = await chosen_ladder(self._store, state, settings_in_force(state))
            if ladder is not None:
                state = with_ladder(state, ladder)
                _log.info("step %d %s", ladder.step, ladder.reason)
            changed = bool(changes) or _differs(state, before)
            state = dataclasses.replace(state, begun_step=state.step)
            self._use(settings_in_force(state))
            if changed or added_known != before.added_known:
                state = dataclasses.replace(state, planned_steps=self._planned_steps(state))
            fence = self._context.fence
            await self._store.begin_step(fence, state, changed=changed, ladder=ladder)
            return state
        self._use(settings_in_force(state))
        await self.prompts.know(state.added_known)
        return state

    def _planned_steps(self, state: RunState) -> int:
        """Steps that data and max_steps allow in all, as it looks now."""
        left = self.prompts.left(state) + len(state.deferred)
        by_data = state.step - (-left // self._rules.prompts_per_step)
        return min(by_data, self._settings.max_steps or by_data)

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
        waits = bool(state.waiting_settings)  # for the end of the queue
        new_prompts = self._new_prompts(state, stopping=self._control.drains or waits)
        return Backlog(state.step, deferred, new_prompts, state.long_round)

    def _new_prompts(self, state: RunState, *, stopping: bool) -> int:
        if stopping:
            return 0
        max_steps = self._settings.max_steps
        return new_prompt_budget(
            self._rules,
            data_left=self.prompts.left(state),
            deferred=len(state.deferred),
            steps_left=max_steps - state.step if max_steps else None,
        )

    async def _roll_out(self, state: RunState, planned: RoundPlan, started: float) -> StepOutcome:
        """Run the round; fix in Redis what the step will train and commit."""
        draws = RoundDraws(self.prompts, state, planned, self._rules)
        stream = SampleStream(self._context.redis, self._context.run_id, state.step)
        restored = await stream.read_all()
        if self._trains_early:
            await self._trainer.start_step(state.step)
        result = await self._rounds.run(state, planned, draws, restored, stream)
        outcome = round_outcome(
            draws.state,
            self._rules,
            planned,
            result,
            self.prompts.domain_of,
            started=started,
            ended=time.time(),
        )
        await self._drafts.save(result.drafts)
        await self._store.save_outcome(state.step, outcome)
        return outcome

    async def _finish(self, state: RunState, outcome: StepOutcome) -> StepResult:
        tokens = outcome.next_state.totals.trained_tokens - state.totals.trained_tokens
        snapshot = state_to_json(outcome.next_state)
        if not self._trains_early:
            await self._trainer.start_step(state.step)
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


def _differs(state: RunState, before: RunState) -> bool:
    """Whether other settings are in force or wait."""
    now, then = (
        (some.updated_settings, some.waiting_settings, some.deferred) for some in (state, before)
    )
    return now != then
