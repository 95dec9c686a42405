"""The durable state of one run: read freely, changed only by the scripts below.

A step is committed by one atomic script that compares the fence and the step number and then
writes the new state, the long-prompt queue, the step's record and an event. So a crash leaves
either the old commit point or the new one, and a coordinator that was replaced writes nothing.

What people ask for in between stands in two logs that only grow: changes, and added prompts. The
state says how much of each it contains. That is settled once for each step, when it begins: a step
that is repeated after a crash contains the same. Only when a run that has stopped or failed goes on
may its open step begin anew (`reopen_step`), so that a change can mend it. A rewind goes back in
the state, not in the logs, so what came later is taken up again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rollpacker.store import keys, records, scripts
from rollpacker.store.records import ChosenLadder, RunState, StepOutcome
from rollpacker.types import StepRecord

MAX_LEVELS = 8  # deferral_levels is limited to this
_KEPT_EVENTS = 10_000


class StaleFenceError(Exception):
    """Another coordinator has taken the run over; stop."""


class StepMismatchError(Exception):
    """The commit point is not where the writer believed; `step` is where it is."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the committed step is {step}")
        self.step = step


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An entry of the event stream."""

    revision: str
    time: float  # seconds since the Unix epoch
    kind: str  # "run", "step" or "ladder"
    record: StepRecord | None = None  # of a step
    ladder: ChosenLadder | None = None  # of mode auto


async def list_run_ids(redis: Redis) -> list[str]:
    """Every run that this Redis knows, newest first."""
    names: Any = await redis.zrevrange(keys.RUNS, 0, -1)
    return [name.decode() for name in names]


class RunStore:
    """The state of one run."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self.run_id = run_id
        self._state = keys.state(run_id)
        self._queues = [keys.deferred(run_id, level) for level in range(1, MAX_LEVELS + 1)]

    async def create(self, state: RunState) -> None:
        """Write the first state. Repeat: no effect on a run that exists."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, value in _fields(state).items():
                pipe.hsetnx(self._state, name, value)
            await pipe.execute()
        await self._redis.zadd(keys.RUNS, {self.run_id: state.create_time}, nx=True)

    async def load(self) -> RunState | None:
        """The commit point, or None for an unknown run."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._state)
            for queue in self._queues:
                pipe.lrange(queue, 0, -1)
            fields, *queues = await pipe.execute()
        if b"state" not in fields:
            return None
        stored = [json.loads(item) for queue in queues for item in queue]
        return dataclasses.replace(
            records.state_from_json(fields[b"state"]),
            status=fields[b"status"].decode(),
            failure=fields[b"failure"].decode(),
            stop_mode=fields[b"stop_mode"].decode(),
            pause_at=_number(fields.get(b"pause_at")),
            deferred=tuple(records.deferred_from_json(item) for item in stored),
        )

    async def claim(self, fence: int) -> None:
        """From now on refuse writers with a lower fence. Raises StaleFenceError."""
        await self._run(scripts.CLAIM, [self._state], [fence])

    async def set_status(
        self,
        fence: int,
        status: str,
        *,
        failure: str = "",
        stop_mode: str = "",
        pause_at: int | None = None,
        only_from: Sequence[str] = (),
    ) -> bool:
        """Change where the run is in its life; False where it is in none of the states `only_from`.

        Repeat (a reply that was lost): True, no effect. Raises StaleFenceError.
        """
        pause = "" if pause_at is None else pause_at
        allowed = f" {' '.join(only_from)} " if only_from else ""
        changed = await self._run(
            scripts.SET_STATUS,
            [self._state, keys.events(self.run_id)],
            [fence, status, failure, stop_mode, pause, _KEPT_EVENTS, allowed],
        )
        return bool(changed)

    async def append_change(self, fence: int, change: str) -> None:
        """Add to the log of changes. Raises StaleFenceError."""
        await self._run(
            scripts.APPEND_CHANGE,
            [self._state, keys.changes(self.run_id), keys.events(self.run_id)],
            [fence, change, _KEPT_EVENTS],
        )

    async def changes_from(self, first: int) -> list[str]:
        """The changes of the log from number `first` on."""
        found: Any = await self._redis.lrange(keys.changes(self.run_id), first, -1)
        return [item.decode() for item in found]

    async def add_prompts(self, fence: int, rows: Mapping[str, str]) -> int:
        """Add rows by prompt id; those that are known are skipped. Returns how many are new.

        Raises StaleFenceError.
        """
        flat = [part for pair in rows.items() for part in pair]
        return await self._run(
            scripts.ADD_PROMPTS,
            [self._state, keys.added_prompts(self.run_id), keys.added_prompt_ids(self.run_id)],
            [fence, *flat],
        )

    async def added_prompts(self, first: int, end: int) -> list[str]:
        """The rows that were added, from number `first` up to and without `end`."""
        if end <= first:
            return []
        found: Any = await self._redis.lrange(keys.added_prompts(self.run_id), first, end - 1)
        return [item.decode() for item in found]

    async def log_lengths(self) -> tuple[int, int]:
        """How many changes and how many added prompts there are."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.llen(keys.changes(self.run_id))
            pipe.llen(keys.added_prompts(self.run_id))
            changes, prompts = await pipe.execute()
        return changes, prompts

    async def begin_step(
        self, fence: int, state: RunState, *, changed: bool, ladder: ChosenLadder | None = None
    ) -> None:
        """Settle what the step contains of the logs, before its round; `changed`: the queue too.
        A `ladder` that was chosen becomes an event.

        Raises StaleFenceError, StepMismatchError.
        """
        await self._run(
            scripts.BEGIN_STEP,
            [self._state, keys.steps(self.run_id), keys.events(self.run_id), *self._queues],
            [
                fence,
                state.step,
                _without_queue(state),
                self._queue_argument(state) if changed else "",
                _KEPT_EVENTS,
                records.ladder_to_json(ladder) if ladder else "",
            ],
        )

    async def reopen_step(self, fence: int) -> None:
        """Let the open step, which nobody drives, begin anew where changes wait: it takes them up.

        Its groups are dropped, to be sampled again. A step whose outcome is fixed stays as it is.
        Repeat: no effect. Raises StaleFenceError, StepMismatchError.
        """
        state = await self.load()
        if state is None or state.begun_step != state.step:
            return
        if not await self.changes_from(state.change_count):
            return
        step = state.step
        await self._run(
            scripts.REOPEN_STEP,
            [
                self._state,
                keys.step_outcome(self.run_id, step),
                keys.step_samples(self.run_id, step),
            ],
            [fence, step, _without_queue(dataclasses.replace(state, begun_step=-1))],
        )

    async def commit(self, fence: int, state: RunState, record: StepRecord) -> None:
        """Move the commit point from step `record.step` to the next one, with state and queue.

        Repeat (a reply that was lost): no effect. Raises StaleFenceError, StepMismatchError.
        """
        try:
            await self._run(
                scripts.COMMIT,
                [self._state, keys.steps(self.run_id), keys.events(self.run_id), *self._queues],
                [
                    fence,
                    record.step,
                    _without_queue(state),
                    self._queue_argument(state),
                    records.record_to_json(record),
                    _KEPT_EVENTS,
                ],
            )
        except StepMismatchError as error:
            if error.step != record.step + 1 or await self.record(record.step) != record:
                raise

    async def rewind(self, fence: int, state: RunState) -> None:
        """Go back to an earlier state; the records of later steps become superseded.

        Raises StaleFenceError.
        """
        current = await self.load()
        last = max(state.step, current.step if current else 0)
        later = [
            key(self.run_id, step)
            for step in range(state.step, last + 1)
            for key in (keys.step_samples, keys.step_outcome, keys.step_result)
        ]
        places = [self._state, keys.steps(self.run_id), keys.events(self.run_id), *self._queues]
        await self._run(
            scripts.REWIND,
            [*places, keys.superseded_steps(self.run_id), *later],
            [fence, state.step, _without_queue(state), self._queue_argument(state)],
        )

    async def save_outcome(self, step: int, outcome: StepOutcome) -> None:
        """Fix what a step will commit, before its optimizer update."""
        data = records.outcome_to_json(outcome)
        await self._redis.set(keys.step_outcome(self.run_id, step), data)

    async def outcome(self, step: int) -> StepOutcome | None:
        """What a step will commit, once its round is over."""
        data = await self._redis.get(keys.step_outcome(self.run_id, step))
        return records.outcome_from_json(data) if data else None

    async def forget_step(self, step: int) -> None:
        """Drop what only an open step needs. Repeat: no effect."""
        await self._redis.delete(
            keys.step_outcome(self.run_id, step), keys.step_samples(self.run_id, step)
        )

    async def record(self, step: int) -> StepRecord | None:
        """The record of a committed step."""
        found: Any = await self._redis.zrangebyscore(keys.steps(self.run_id), step, step)
        return records.record_from_json(found[0]) if found else None

    async def records_before(self, step: int, count: int) -> list[StepRecord]:
        """Up to `count` records of steps below `step`, newest first."""
        found: Any = await self._redis.zrevrangebyscore(
            keys.steps(self.run_id), f"({step}", "-inf", start=0, num=count
        )
        return [records.record_from_json(item) for item in found]

    async def last_revision(self) -> str:
        """The newest event's revision; "0-0" when there is none."""
        found: Any = await self._redis.xrevrange(keys.events(self.run_id), count=1)
        return found[0][0].decode() if found else "0-0"

    async def oldest_kept_revision(self) -> str:
        """Watching after this revision gives every event that is kept; "0-0" if none is gone."""
        try:
            info: Any = await self._redis.xinfo_stream(keys.events(self.run_id))
        except ResponseError:  # no event yet, so no stream
            return "0-0"
        if info["entries-added"] == info["length"]:
            return "0-0"
        milliseconds, _, sequence = info["first-entry"][0].decode().partition("-")
        if int(sequence):
            return f"{milliseconds}-{int(sequence) - 1}"
        return f"{int(milliseconds) - 1}-{2**64 - 1}"

    async def read_events(self, after: str, block_seconds: float) -> list[StoredEvent]:
        """Events after a revision; waits up to `block_seconds` for the first."""
        found: Any = await self._redis.xread(
            {keys.events(self.run_id): after}, count=100, block=max(1, int(block_seconds * 1000))
        )
        streams = found.values() if isinstance(found, dict) else [item[1] for item in found]
        entries = [entry for stream in streams for entry in _flat(stream)]
        return [_event(entry_id.decode(), fields) for entry_id, fields in entries]

    async def _run(self, script: str, names: Sequence[str], values: Sequence[Any]) -> int:
        try:
            return int(await self._redis.eval(script, len(names), *names, *values))
        except ResponseError as error:
            text = str(error)
            if "STALE_FENCE" in text:
                raise StaleFenceError(f"run {self.run_id}: {text}") from error
            if "STEP_MISMATCH" in text:
                raise StepMismatchError(
                    int(text.split("STEP_MISMATCH ")[1].split(maxsplit=1)[0])
                ) from error
            raise

    def _queue_argument(self, state: RunState) -> str:
        levels: list[list[str]] = [[] for _ in self._queues]
        for item in state.deferred:
            levels[item.draw.level - 1].append(json.dumps(records.deferred_to_json(item)))
        return json.dumps(levels)


def _without_queue(state: RunState) -> str:
    return records.state_to_json(dataclasses.replace(state, deferred=()))


def _fields(state: RunState) -> dict[str, str | int]:
    return {
        "state": _without_queue(state),
        "step": state.step,
        "status": state.status,
        "failure": state.failure,
        "stop_mode": state.stop_mode,
        "pause_at": "" if state.pause_at is None else state.pause_at,
    }


def _number(text: bytes | None) -> int | None:
    return int(text) if text else None


def _event(revision: str, fields: dict[bytes, bytes]) -> StoredEvent:
    kind = fields[b"kind"].decode()
    milliseconds = int(revision.partition("-")[0])
    value = fields[b"value"]
    return StoredEvent(
        revision,
        milliseconds / 1000,
        kind,
        records.record_from_json(value) if kind == "step" else None,
        records.ladder_from_json(value) if kind == "ladder" else None,
    )


def _flat(entries: list[Any]) -> list[Any]:
    """RESP3 nests the entries of a stream one list deeper than RESP2."""
    return entries[0] if entries and isinstance(entries[0], list) else entries
