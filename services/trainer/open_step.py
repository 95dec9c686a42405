"""A step that is open: its stream is read from the start and its gradients accumulate.

    sample stream --read--> packer --full window--> leader (the torch thread)

States: *reading* (a background task follows the stream while rollout goes on), *closed*. It reads
at the trainer's own pace: the next entry is taken when the window of the last one is accumulated.
A draw that appears twice is taken once. `position` moves only after an entry was taken, so that a
reader of the same stream after `position` sees exactly what is not yet in the sums.

A group that does not belong to this step, or an unreadable one, makes the step *failed*: every
wait raises that from then on, and only AbandonStep helps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from redis.asyncio import Redis

from rollpacker.rpc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ServiceError,
    UnavailableError,
)
from rollpacker.store.sample_stream import START, SampleStream
from rollpacker.tasks import end_tasks
from rollpacker.types import DrawId, InvalidResponseError, PromptGroup
from rollpacker.wire import WireError
from services.trainer.leader import Leader
from services.trainer.packing import StreamPacker, Window
from services.trainer.redis_retry import through_restarts
from services.trainer.settings import OpenRunSettings

_READ_COUNT = 16  # entries per read
_BLOCK_SECONDS = 1.0
_NAMED_IN_ERRORS = 3
_log = logging.getLogger(__name__)


class OpenStep:
    """One open step of the trainer."""

    def __init__(
        self,
        redis: Redis,
        leader: Leader,
        run_id: str,
        step: int,
        settings: OpenRunSettings,
        vocabulary_size: int,
    ) -> None:
        self.run_id = run_id
        self.step = step
        self.packer = StreamPacker(
            leader.shard_size, settings.micro_batch_tokens, leader.replica_count
        )
        self.accumulate_seconds = 0.0
        self._leader = leader
        self._vocabulary_size = vocabulary_size
        self._deterministic = settings.deterministic
        self._windows = 0
        self._stream = SampleStream(redis, run_id, step)
        self._position = START
        self._entry_ids: list[str] = []
        self._taken: set[DrawId] = set()
        self._failure: ServiceError | None = None
        self._moved = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(), name=f"reader of step {step}")

    def fail(self, failure: ServiceError) -> None:
        """From now on every wait raises this."""
        self._failure = self._failure or failure

    async def close(self) -> None:
        """Stop reading. What the torch thread has begun still ends. Repeat: no effect."""
        self.fail(FailedPreconditionError("STEP_NOT_OPEN", f"step {self.step} was closed"))
        await self._stop_reading()
        await self._notify()

    async def take_exactly(self, draws: Sequence[DrawId], seconds: float) -> None:
        """Wait until the sums hold these draws and the stream holds no other one.

        Raises FailedPreconditionError (STEP_DRAWS_DIFFER) when it does, DeadlineExceededError
        (DRAWS_MISSING) after `seconds`, and the failure of the step. The step stays open.
        """
        named = set(draws)
        end = time.monotonic() + seconds

        def nothing_missing() -> bool:
            self._check_named(named)
            return named <= self._taken

        await self._wait_for(nothing_missing, named, end)
        while rest := await through_restarts(
            lambda: self._stream.read(self._position, 1, 0), f"end of step {self.step}"
        ):
            entry_id = rest[0][0]
            await self._wait_for(partial(self._has_taken, entry_id), named, end)
        self._check_named(named)

    async def flush(self, draws: Sequence[DrawId]) -> None:
        """Read no more and accumulate the last, partial window. The draws were all taken."""
        await self._stop_reading()
        try:
            self._check_named(set(draws))  # once more: now nothing can come in between
        except FailedPreconditionError as error:
            self.fail(error)
            raise
        for replica, windows in enumerate(self.packer.flush()):
            await self._accumulate(windows, replica)

    async def acknowledge(self) -> None:
        """Tell the stream that its groups are trained."""
        await self._stream.acknowledge(self._entry_ids)

    async def _read(self) -> None:
        """Follow the stream until the step is closed or fails."""
        while not self._failure:
            try:
                entries = await through_restarts(
                    lambda: self._stream.read(self._position, _READ_COUNT, _BLOCK_SECONDS),
                    f"stream of step {self.step}",
                )
            except UnavailableError as error:
                _log.warning("%s; still trying", error)
                continue
            except (WireError, InvalidResponseError) as error:
                self.fail(_invalid_sample(self.step, str(error)))
                entries = []
            for entry_id, group in entries:
                await self._take(entry_id, group)
            await self._notify()

    async def _take(self, entry_id: str, group: PromptGroup) -> None:
        if self._failure:
            return
        if group.draw.id not in self._taken:
            wrong = _what_is_wrong(group, self.run_id, self.step, self._vocabulary_size)
            if wrong:
                self.fail(_invalid_sample(self.step, f"draw {group.draw.id}: {wrong}"))
                return
            self._taken.add(group.draw.id)
            windows = self.packer.add(group)
            if windows is not None:
                in_turn = self._windows % self._leader.replica_count
                self._windows += 1
                await self._accumulate(windows, in_turn if self._deterministic else None)
        self._entry_ids.append(entry_id)
        self._position = entry_id

    async def _accumulate(self, windows: Sequence[Window], replica: int | None) -> None:
        start = time.monotonic()
        await self._leader.accumulate(windows, replica)
        self.accumulate_seconds += time.monotonic() - start

    async def _stop_reading(self) -> None:
        await end_tasks(self._reader)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def _wait_for(self, is_done: Callable[[], bool], named: set[DrawId], end: float) -> None:
        async with self._moved:
            while True:
                if self._failure:
                    raise self._failure
                if is_done():
                    return
                try:
                    await asyncio.wait_for(self._moved.wait(), max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise self._draws_missing(named) from None

    def _has_taken(self, entry_id: str) -> bool:
        return entry_id in self._entry_ids

    def _check_named(self, named: set[DrawId]) -> None:
        extra = self._taken - named
        if extra:
            raise FailedPreconditionError(
                "STEP_DRAWS_DIFFER",
                f"step {self.step}: the stream holds {len(extra)} draws that FinishStep does not"
                f" name ({_some(extra)}); name them, or abandon the step",
            )

    def _draws_missing(self, named: set[DrawId]) -> DeadlineExceededError:
        missing = named - self._taken
        return DeadlineExceededError(
            "DRAWS_MISSING",
            f"step {self.step}: {len(missing)} of {len(named)} draws have not been read from the"
            f" sample stream ({_some(missing)}); the step stays open",
        )


def _what_is_wrong(group: PromptGroup, run_id: str, step: int, vocabulary_size: int) -> str:
    """Why a group cannot be trained in this step; empty when it can."""
    if (group.run_id, group.step) != (run_id, step):
        return f"it belongs to step {group.step} of run {group.run_id}"
    if group.weight_version != step:
        return f"weight version {group.weight_version} sampled it, not {step}"
    if not group.prompt_token_ids:
        return "its prompt has no token"
    if not 0 <= group.selection_weight < math.inf:
        return (
            f"selection_weight is {group.selection_weight}; whoever writes the stream must give it"
            " a finite one of at least 0 (1: it counts once)"
        )
    for scored in group.responses:
        if not math.isfinite(scored.advantage):
            return f"response {scored.response.response_id} has advantage {scored.advantage}"
    unknown = _token_outside(group, vocabulary_size)
    if unknown is not None:
        return (
            f"token {unknown} is none of the {vocabulary_size} that the model knows: the tokenizer,"
            " or the engine, is of another model"
        )
    return ""


def _token_outside(group: PromptGroup, vocabulary_size: int) -> int | None:
    tokens = [group.prompt_token_ids, *(scored.response.token_ids for scored in group.responses)]
    for of_one in tokens:
        for extreme in (min(of_one, default=0), max(of_one, default=0)):
            if not 0 <= extreme < vocabulary_size:
                return extreme
    return None


def _invalid_sample(step: int, what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        "INVALID_SAMPLE", f"step {step}: {what}; abandon the step and delete its sample stream"
    )


def _some(draws: set[DrawId]) -> str:
    shown = ", ".join(map(str, sorted(draws)[:_NAMED_IN_ERRORS]))
    return shown if len(draws) <= _NAMED_IN_ERRORS else f"{shown}, ..."
