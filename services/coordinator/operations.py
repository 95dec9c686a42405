"""What people ask of a run that is there: stop, pause, resume, change.

A wish is written to Redis first, under the fence, and then told to the driver; so a coordinator
that dies in between finds it when it comes back. Changes go to the run's log and are carried out
when the next step begins (`changes.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rollpacker.rpc.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from rollpacker.settings import SettingsError
from rollpacker.store.records import RunState
from rollpacker.store.run_store import StaleFenceError
from rollpacker.types import DrawId
from services.coordinator.changes import (
    Change,
    DropDraws,
    ForceLongRound,
    RequeueDraws,
    UpdateSettings,
    change_from_json,
    change_to_json,
    checked_update,
    known_draws,
    settings_in_force,
    settled,
    to_drop,
)
from services.coordinator.control import RunControl
from services.coordinator.driven_run import ActiveRun
from services.coordinator.run_values import check_cap, invalid_settings
from services.coordinator.runs import OPEN, Runs
from services.coordinator.validation import Measurement

_MAX_ROWS = 1000


class RunOperations:
    """See the top of the file. All raise NotFoundError (RUN_NOT_FOUND) and UnavailableError."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def stop(self, run_id: str, mode: str) -> RunState:
        """StopRun; mode is after_step, drain or immediately."""
        state = await self._runs.get(run_id)
        if state.status == "queued" and await self._runs.leave_queue(run_id):
            return await self._runs.get(run_id)
        active = self._runs.active(run_id)
        if active is None or state.status not in OPEN:
            self._check_taken_up(state)
            return state
        async with _wishing(active):
            wished = await self._set_status(run_id, "stopping", stop_mode=mode)
            if wished and (control := self._control(run_id)):
                control.stop(mode)
        driven = self._runs.active(run_id)  # by now
        if mode == "immediately" and driven and driven.task:
            await asyncio.wait({driven.task})
        return await self._runs.get(run_id)

    async def pause(self, run_id: str, mode: str) -> RunState:
        """PauseRun; mode is after_step or immediately."""
        state, active = await self._open(run_id)
        if state.status in ("paused", "stopping"):
            return state
        async with _wishing(active):
            at_once = mode == "immediately"
            status = "paused" if at_once else "pausing"
            pause_at = None if at_once else 0
            wished = await self._set_status(
                run_id, status, pause_at=pause_at, only_from=("running", "pausing")
            )
            control = self._control(run_id)
            if wished and control and at_once:
                await control.pause_now()
            elif wished and control:
                control.pause(0)
        return await self._runs.get(run_id)

    async def resume(self, run_id: str, until_step: int) -> RunState:
        """ResumeRun; until_step 0 is to the end."""
        if until_step < 0:
            raise InvalidArgumentError.field("until_step", f"{until_step} is below 0")
        state, active = await self._open(run_id)
        if state.status == "stopping" or 0 < until_step <= state.step:
            return state
        pause_at = until_step or None
        if (state.status, state.pause_at) == ("running", pause_at):
            return state
        async with _wishing(active):
            wished = await self._set_status(
                run_id, "running", pause_at=pause_at, only_from=("running", "pausing", "paused")
            )
            if wished and (control := self._control(run_id)):
                control.go_on(pause_at)
        return await self._runs.get(run_id)

    async def update(self, run_id: str, values: Mapping[str, Any]) -> RunState:
        """UpdateRun."""
        state = await self._changeable(run_id)
        try:
            change = checked_update(state, await self._pending(state), values)
            self._check_lengths(run_id, change)
        except SettingsError as error:
            raise invalid_settings(error) from error
        return await self._append(run_id, change)

    async def force_long_round(self, run_id: str) -> RunState:
        """ForceLongRound."""
        state = await self._changeable(run_id)
        if not (await self._settled(state)).deferred:
            raise FailedPreconditionError(
                "NOTHING_DEFERRED", f"run {run_id} has no deferred draws; see ListDeferredDraws"
            )
        return await self._append(run_id, ForceLongRound())

    async def requeue(self, run_id: str, draws: Sequence[DrawId], level: int) -> RunState:
        """RequeueDraws."""
        state = await self._changeable(run_id)
        after = await self._settled(state)
        levels = settings_in_force(after).tail_batching.resolved_levels
        if not 1 <= level <= levels:
            raise InvalidArgumentError.field(
                "level", f"{level} is outside 1 to {levels}, the run's deferral levels"
            )
        _check_draws(draws, set(known_draws(after)))
        return await self._append(run_id, RequeueDraws(tuple(draws), level))

    async def drop(self, run_id: str, draws: Sequence[DrawId], reason: str) -> RunState:
        """DropDraws."""
        if not reason:
            raise InvalidArgumentError.field("reason", "is empty; say why, for the list")
        state = await self._changeable(run_id)
        after = await self._settled(state)
        known = set(known_draws(after)) | self._ahead(state, set(draws))
        _check_draws(draws, known, " nor, as far as is known, ahead in the data")
        return await self._append(run_id, DropDraws(tuple(draws), reason))

    async def add_prompts(self, run_id: str, rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """AddPrompts; returns how many are new, and how many were known."""
        if not 0 < len(rows) <= _MAX_ROWS:
            raise InvalidArgumentError.field(
                "rows", f"are {len(rows)}; give 1 to {_MAX_ROWS} in a call"
            )
        _, active = await self._open(run_id)
        if active.driver is None:
            raise UnavailableError("RUN_STARTING", f"run {run_id} still reads its data; try again")
        prompts = await asyncio.to_thread(active.driver.prompts.parsed, rows)
        by_id = {
            prompt.prompt_id: json.dumps(row) for prompt, row in zip(prompts, rows, strict=True)
        }
        with _standing_by():
            added = await self._runs.store(run_id).add_prompts(self._runs.fence(), by_id)
        return added, len(rows) - added

    async def save_checkpoint(self, run_id: str) -> int:
        """SaveCheckpoint; returns the version that it holds."""
        _, active = await self._open(run_id)
        if active.driver is None:
            raise UnavailableError("RUN_STARTING", f"run {run_id} still reads its data; try again")
        return await active.driver.save_checkpoint()

    async def evaluate(self, run_id: str) -> Measurement:
        """RunEvaluation."""
        await self._runs.get(run_id)
        active = self._runs.active(run_id)
        if active is None or active.driver is None:
            raise FailedPreconditionError(
                "RUN_NOT_ACTIVE",
                f"run {run_id} is not being driven; its measurements are in validation.jsonl, and"
                " StartRun with the same settings goes on with one that was stopped",
            )
        return await active.driver.validator.request()

    # --- how ----------------------------------------------------------------------------------

    async def _open(self, run_id: str) -> tuple[RunState, ActiveRun]:
        """A run that is driven. Raises FailedPreconditionError (RUN_NOT_ACTIVE)."""
        state = await self._runs.get(run_id)
        self._runs.fence()
        active = self._runs.active(run_id)
        if active is None or state.status not in OPEN:
            self._check_taken_up(state)
            remedy = {
                "queued": "wait for its turn, or take it out with StopRun",
                "succeeded": "start another one",
            }.get(state.status, "StartRun with the same settings goes on")
            raise FailedPreconditionError(
                "RUN_NOT_ACTIVE", f"run {run_id} is not active ({state.status}); {remedy}"
            )
        return state, active

    def _control(self, run_id: str) -> RunControl | None:
        """None while the data of the run is loading: its driver will find the wish in Redis."""
        active = self._runs.active(run_id)
        return active.control if active else None

    def _check_taken_up(self, state: RunState) -> None:
        """Raises UnavailableError while this coordinator has not looked for open runs yet."""
        if state.status in OPEN and self._runs.is_starting:
            raise UnavailableError(
                "RUN_STARTING", f"run {state.run_id} is being taken up again; try again"
            )

    async def _changeable(self, run_id: str) -> RunState:
        state = await self._runs.get(run_id)
        self._runs.fence()
        if state.status == "succeeded":
            raise FailedPreconditionError("RUN_ENDED", f"run {run_id} has succeeded")
        return state

    def _check_lengths(self, run_id: str, change: UpdateSettings) -> None:
        """Raises SettingsError: see `check_cap`."""
        cap = change.settings.get("sampling", {}).get("max_response_tokens")
        active = self._runs.active(run_id)
        if cap is None or active is None or active.driver is None:
            return
        check_cap(cap, *active.driver.lengths())

    async def _pending(self, state: RunState) -> list[Change]:
        store = self._runs.store(state.run_id)
        return [change_from_json(text) for text in await store.changes_from(state.change_count)]

    async def _settled(self, state: RunState) -> RunState:
        """The state with the changes that wait for the next round."""
        pending = await self._pending(state)
        return settled(state, pending, self._ahead(state, to_drop(pending)))

    def _ahead(self, state: RunState, draws: set[DrawId]) -> set[DrawId]:
        """Those that are not drawn yet; of a run that is not driven nobody knows."""
        active = self._runs.active(state.run_id)
        driver = active.driver if active else None
        return driver.prompts.ahead(state, draws) if driver and draws else set()

    async def _append(self, run_id: str, change: Change) -> RunState:
        with _standing_by():
            await self._runs.store(run_id).append_change(self._runs.fence(), change_to_json(change))
        return await self._runs.get(run_id)

    async def _set_status(
        self,
        run_id: str,
        status: str,
        *,
        stop_mode: str = "",
        pause_at: int | None = None,
        only_from: Sequence[str] = OPEN,
    ) -> bool:
        with _standing_by():
            return await self._runs.store(run_id).set_status(
                self._runs.fence(),
                status,
                stop_mode=stop_mode,
                pause_at=pause_at,
                only_from=only_from,
            )


@asynccontextmanager
async def _wishing(active: ActiveRun) -> AsyncIterator[None]:
    """One wish at a time reaches a driver, in the order of their writing."""
    async with active.lock:
        yield


@contextmanager
def _standing_by() -> Iterator[None]:
    """A write that is refused by its fence: another coordinator has taken over."""
    try:
        yield
    except StaleFenceError as error:
        raise UnavailableError("STANDBY", f"another coordinator has taken over: {error}") from error


def _check_draws(draws: Sequence[DrawId], known: set[DrawId], also: str = "") -> None:
    if not draws:
        raise InvalidArgumentError.field("draws", "is empty; name one or more of the queue")
    unknown = [str(draw) for draw in draws if draw not in known]
    if unknown:
        raise NotFoundError(
            "DRAW_NOT_FOUND",
            f"not in the queue{also}: {', '.join(unknown[:5])}; see ListDeferredDraws",
        )
