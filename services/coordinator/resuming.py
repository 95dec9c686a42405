"""Bringing state, trainer and outputs of a run to one point.

Redis: commit point n ---+
trainer: weights m ------+--> m = n: go on
outcome of step n? ------+    m = n + 1 with the outcome: FinishStep is repeated, then the commit
                              else: the run goes where the trainer's newest checkpoint is
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

from rollpacker.store.records import RunState, state_from_json
from rollpacker.store.run_store import RunStore
from rollpacker.v1 import trainer_service_pb2
from services.coordinator.run_context import RunContext
from services.coordinator.step_files import StepFiles, in_thread
from services.coordinator.trainer_client import TrainerClient

_log = logging.getLogger(__name__)


class Resuming:
    """Where one run goes on."""

    def __init__(self, context: RunContext, trainer: TrainerClient, files: StepFiles) -> None:
        self._context = context
        self._trainer = trainer
        self._files = files
        self._store = RunStore(context.redis, context.run_id)

    async def resume(self) -> RunState:
        """Bring state, trainer and outputs of a claimed run to one point."""
        state = await self.load()
        opened = await self._trainer.open_run()
        state = await self.reconcile(state, opened)
        if state.begun_step < 0:  # the trainer may hold groups of a step that begins anew
            await self._trainer.abandon_step(state.step)
        await in_thread(partial(self._context.outputs.begin, state.create_time))
        if state.step:
            await self._files.write(state.step - 1)
        return state

    async def reconcile(
        self, state: RunState, opened: trainer_service_pb2.OpenRunResponse
    ) -> RunState:
        """Make the state fit the trainer's weights: the same, one unfinished commit ahead, or
        (its newest checkpoint is older or newer than the commit point) the checkpoint's own."""
        version = opened.weight_version
        if version == state.weight_version:
            return dataclasses.replace(state, weights_uri=opened.weights_uri)
        outcome = await self._store.outcome(state.step)
        if version == state.weight_version + 1 and outcome is not None:
            return state  # FinishStep is repeated and the step committed
        if opened.run_snapshot_json:
            snapshot = state_from_json(opened.run_snapshot_json)
        else:
            snapshot = RunState(
                state.run_id,
                state.settings,
                state.create_time,
                state.planned_steps,
                data_digest=state.data_digest,
            )
        _log.warning(
            "run %s goes from step %d to step %d: the trainer's newest checkpoint is there",
            state.run_id,
            state.step,
            snapshot.step,
        )
        snapshot = dataclasses.replace(
            snapshot,
            status=state.status,
            stop_mode=state.stop_mode,
            pause_at=state.pause_at,
            weights_uri=opened.weights_uri,
        )
        await self._store.rewind(self._context.fence, snapshot)
        self._context.outputs.supersede_from(snapshot.step)
        return snapshot

    async def load(self) -> RunState:
        """The commit point."""
        state = await self._store.load()
        assert state is not None, "a run is created before it is driven"
        return state
