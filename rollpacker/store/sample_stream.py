"""The sample stream of one step: prompt groups from the coordinator to the trainer.

The coordinator appends each accepted group once, in the order of the race. The trainer reads from
the start of the stream at its own pace and acknowledges the groups only after the update that
contains them is durable; a trainer that was restarted simply reads again from the start.
Entries are `rollpacker.v1.PromptGroup` bytes; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rollpacker import wire
from rollpacker.store import keys
from rollpacker.types import DrawId, PromptGroup, StepResult
from rollpacker.v1 import trainer_service_pb2, types_pb2

_FIELD = b"group"
START = "0-0"
_PAGE = 128  # groups


class SampleStream:
    """The stream and the recorded result of one step."""

    def __init__(self, redis: Redis, run_id: str, step: int) -> None:
        self._redis = redis
        self._samples = keys.step_samples(run_id, step)
        self._result = keys.step_result(run_id, step)

    async def append(self, group: PromptGroup) -> None:
        """Add one group. Raises redis errors; a repeat adds a second entry (readers skip it)."""
        data = wire.prompt_group_to_proto(group).SerializeToString()
        await self._redis.xadd(self._samples, {_FIELD: data})

    async def read(
        self, after: str, count: int, block_seconds: float
    ) -> list[tuple[str, PromptGroup]]:
        """Up to `count` (entry id, group) after an entry id, START for all.

        Waits up to `block_seconds` for the first one; 0 does not wait. May return nothing.
        """
        block = max(1, round(block_seconds * 1000)) if block_seconds > 0 else None
        found: Any = await self._redis.xread({self._samples: after}, count=count, block=block)
        streams = found.values() if isinstance(found, dict) else (entries for _, entries in found)
        return [
            (_text(entry_id), wire.prompt_group_from_proto(_parse(fields)))
            for entries in streams
            for entry_id, fields in _flat(entries)
        ]

    async def read_all(self) -> list[PromptGroup]:
        """Every group in the stream, in order, each draw once. Others have turns in between."""
        groups: dict[DrawId, PromptGroup] = {}
        after = START
        while page := await self.read(after, _PAGE, block_seconds=0):
            after = page[-1][0]
            for _, group in page:
                groups.setdefault(group.draw.id, group)
        return list(groups.values())

    async def acknowledge(self, entry_ids: Sequence[str]) -> None:
        """Mark entries as trained: the update that contains them is durable. Repeat: no effect."""
        try:
            await self._redis.xgroup_create(
                self._samples, keys.TRAINER_GROUP, id="0", mkstream=True
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        if entry_ids:
            await self._redis.xreadgroup(
                keys.TRAINER_GROUP, "trainer", {self._samples: ">"}, count=len(entry_ids)
            )
            await self._redis.xack(self._samples, keys.TRAINER_GROUP, *entry_ids)

    async def record_result(self, result: StepResult) -> None:
        """Keep what FinishStep returned, so that a repeat returns it."""
        await self._redis.set(self._result, wire.step_result_to_proto(result).SerializeToString())

    async def result(self) -> StepResult | None:
        """The recorded result, or None while the step is not finished."""
        data: Any = await self._redis.get(self._result)
        if data is None:
            return None
        return wire.step_result_from_proto(trainer_service_pb2.FinishStepResponse.FromString(data))

    async def delete(self) -> None:
        """Drop the groups; the result stays. Repeat: no effect."""
        await self._redis.delete(self._samples)


def _parse(fields: dict[bytes, bytes]) -> types_pb2.PromptGroup:
    return types_pb2.PromptGroup.FromString(fields[_FIELD])


def _text(entry_id: bytes | str) -> str:
    return entry_id.decode() if isinstance(entry_id, bytes) else entry_id


def _flat(entries: list[Any]) -> list[Any]:
    """RESP3 nests the entries of a stream one list deeper than RESP2."""
    return entries[0] if entries and isinstance(entries[0], list) else entries
